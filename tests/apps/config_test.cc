// Goal: what the user wrote is what the trainer gets, and what cannot be is refused with its place.
// Method: TOML and arguments as text; messages are checked for key, line, found and allowed values.

#include "apps/config.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "apps/config_keys.h"
#include "base/error.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

std::string toml_error(const std::string& text) {
  return error_of([&] {
    JobConfig config;
    apply_toml(config, text, "run.toml");
  });
}

std::string override_error(const std::vector<std::string>& arguments) {
  return error_of([&] {
    JobConfig config;
    apply_overrides(config, arguments);
  });
}

std::string validate_error(const std::vector<std::string>& arguments) {
  JobConfig config;
  apply_overrides(config, arguments);
  return error_of([&] { validate(config); });
}

#define EXPECT_SAYS(message, part) \
  EXPECT_NE((message).find(part), std::string::npos) << "the message is: " << (message)

TEST(Config, DefaultsAreValidAndAreThoseOfTheHelp) {
  const JobConfig config = load_config("", {});
  EXPECT_EQ(validate_error({}), "no error");
  EXPECT_EQ(config.job.dump_folder, "runs/default");
  EXPECT_EQ(config.training.global_batch_size, -1);
  EXPECT_EQ(config.parallelism.strategy, "fsdp");
  EXPECT_FALSE(config.lr_scheduler.decay_ratio.has_value());
  const std::string help = config_help();
  for (const Key& key : config_keys()) {
    EXPECT_SAYS(help, "--" + key.full_name() + "  (" + describe_allowed(key));
    const std::string value = value_text(key, config);
    EXPECT_SAYS(help, value.empty() ? "; unset)" : "; default " + value + ")");
  }
}

TEST(Config, EveryDefaultIsAllowedAndEveryKeyHasAKnownSectionAndAName) {
  std::set<std::string> names;
  for (const Key& key : config_keys()) {
    EXPECT_TRUE(names.insert(key.full_name()).second) << key.full_name() << " is there twice";
    const std::string value = value_text(key, JobConfig());
    if (value.empty()) continue;
    // Also finds a row whose section is not in the list of sections.
    EXPECT_EQ(toml_error("[" + std::string(key.section) + "]\n" + key.name + " = " + value),
              "no error");
  }
}

TEST(Config, ReadsEveryTypeFromToml) {
  JobConfig config;
  apply_toml(config,
             "[training]\nsteps = 1_000_000\nmax_norm = 2\ndataset_path = 'a b'\n"
             "[model]\ntied_embeddings = false\n"
             "[lr_scheduler]\ndecay_ratio = 0.25\n"
             "[optimizer]\nlr = 3e-4\n",
             "run.toml");
  EXPECT_EQ(config.training.steps, 1000000);
  EXPECT_EQ(config.training.max_norm, 2.0);
  EXPECT_EQ(config.training.dataset_path, "a b");
  ASSERT_TRUE(config.model.tied_embeddings.has_value());
  EXPECT_FALSE(*config.model.tied_embeddings);
  EXPECT_EQ(config.lr_scheduler.decay_ratio.value_or(-1), 0.25);
  EXPECT_EQ(config.optimizer.lr, 3e-4);
  EXPECT_EQ(config.training.seq_len, JobConfig().training.seq_len) << "others keep their default";
}

TEST(Config, OverridesTakeBothFormsAndTheLastOneWins) {
  JobConfig config;
  apply_overrides(config, {"--training.steps=5", "--training.steps", "7", "--optimizer.lr", "1",
                           "--training.global_batch_size", "-1", "--model.tied_embeddings=true",
                           "--sampling.sample_prompt", "--x=y z", "--job.description=a=b",
                           "--lr_scheduler.decay_ratio=0.5"});
  EXPECT_EQ(config.training.steps, 7);
  EXPECT_EQ(config.optimizer.lr, 1.0);
  EXPECT_EQ(config.training.global_batch_size, -1);
  EXPECT_TRUE(config.model.tied_embeddings.value_or(false));
  EXPECT_EQ(config.sampling.sample_prompt, "--x=y z");
  EXPECT_EQ(config.job.description, "a=b");
  EXPECT_EQ(config.lr_scheduler.decay_ratio.value_or(-1), 0.5);
}

TEST(Config, OverridesGoOverTheFile) {
  std::string pattern = (fs::path(testing::TempDir()) / "config_XXXXXX").string();
  const fs::path folder = ::mkdtemp(pattern.data());
  const std::string path = (folder / "run.toml").string();
  std::ofstream(path) << "[training]\nsteps = 3\nseq_len = 11\n";
  const JobConfig config = load_config(path, {"--training.steps=4"});
  EXPECT_EQ(config.training.steps, 4);
  EXPECT_EQ(config.training.seq_len, 11);

  std::ofstream(path) << "[training]\nsteps = 0\n";
  EXPECT_SAYS(error_of([&] { load_config(path, {}); }), path + ":2: training.steps");
  EXPECT_SAYS(error_of([&] { load_config(folder.string(), {}); }), "is a folder");
  fs::remove_all(folder);
  const std::string missing = error_of([&] { load_config(path, {}); });
  EXPECT_SAYS(missing, path);
  EXPECT_SAYS(missing, "No such file");
}

TEST(Config, UnknownNamesComeWithTheNearestKnownOne) {
  const std::string key = toml_error("[training]\nsteps = 1\nseq_length = 4\n");
  EXPECT_SAYS(key, "run.toml:3: unknown key 'training.seq_length'");
  EXPECT_SAYS(key, "Did you mean 'training.seq_len'?");
  EXPECT_SAYS(key, "local_batch_size");
  EXPECT_SAYS(toml_error("[training]\nseed = 1\n"), "Did you mean 'debug.seed'?");
  EXPECT_SAYS(toml_error("\n[optimiser]\nlr = 1\n"), "run.toml:2: unknown section 'optimiser'");
  EXPECT_SAYS(toml_error("[optimiser]\nlr = 1\n"), "Did you mean 'optimizer'?");
  EXPECT_SAYS(toml_error("steps = 1\n"), "run.toml:1: 'steps' is outside of any [section]");
  EXPECT_SAYS(toml_error("steps = 1\n"), "Did you mean 'training.steps'?");
  EXPECT_SAYS(toml_error("training = 1\n"), "expected a section [training]");
  EXPECT_SAYS(toml_error("[training.steps]\na = 1\n"), "found a table");
  EXPECT_SAYS(override_error({"--training.stesp=1"}), "Did you mean 'training.steps'?");
  EXPECT_SAYS(override_error({"--trainng.steps=1"}), "Did you mean 'training'?");
  EXPECT_SAYS(override_error({"--steps=1"}), "Did you mean --training.steps?");
  EXPECT_SAYS(override_error({"training.steps=1"}), "expected --section.key=value");
  EXPECT_SAYS(override_error({"--training.steps"}), "the value is missing");
}

TEST(Config, WrongTypesAreRefusedWithTheirLine) {
  const std::string message = toml_error("[training]\n\nsteps = \"many\"\n");
  EXPECT_EQ(message,
            "run.toml:3: training.steps: expected an integer >= 1, found the text \"many\".");
  EXPECT_SAYS(toml_error("[training]\nsteps = 1.5\n"), "found the number 1.5");
  EXPECT_SAYS(toml_error("[training]\nsteps = true\n"), "found true");
  EXPECT_SAYS(toml_error("[training]\nsteps = [1]\n"), "found an array");
  EXPECT_SAYS(toml_error("[optimizer]\nlr = \"1\"\n"), "expected a number >= 0");
  EXPECT_SAYS(toml_error("[training]\ndataset_path = 3\n"), "expected text, found the integer 3");
  EXPECT_SAYS(toml_error("[model]\ntied_embeddings = 1\n"), "expected true or false");
  EXPECT_SAYS(toml_error("[job]\ndescription = 2020-01-01\n"), "found a date or time");
  for (const char* value : {"", "1.0", "1x", " 1", "99999999999999999999", "0x10"}) {
    const std::string error = override_error({std::string("--training.steps=") + value});
    EXPECT_EQ(error, base::str("command line: training.steps: expected an integer >= 1, found '",
                               value, "'."));
  }
  EXPECT_SAYS(override_error({"--optimizer.lr=fast"}), "found 'fast'");
  EXPECT_SAYS(override_error({"--model.tied_embeddings=yes"}), "expected true or false");
}

TEST(Config, ValuesOutOfRangeAreRefused) {
  const std::vector<std::string> bad = {"training.steps=0",
                                        "training.steps=-1",
                                        "training.max_norm=0",
                                        "optimizer.beta1=1",
                                        "optimizer.beta2=-0.1",
                                        "optimizer.lr=-1",
                                        "optimizer.lr=nan",
                                        "optimizer.lr=inf",
                                        "lr_scheduler.decay_ratio=1.01",
                                        "training.threads=-1",
                                        "metrics.log_freq=0",
                                        "comm.train_timeout_seconds=0",
                                        "debug.seed=-1",
                                        "parallelism.ddp_bucket_mb=0",
                                        "training.global_batch_size=-2",
                                        "lr_scheduler.warmup_steps=-1",
                                        "lr_scheduler.min_lr_factor=2"};
  for (const std::string& argument : bad) {
    EXPECT_SAYS(override_error({"--" + argument}), "expected a");
  }
  EXPECT_SAYS(toml_error("[optimizer]\nlr = nan\n"),
              "expected a number >= 0, found the number nan");
  EXPECT_EQ(override_error({"--optimizer.beta1=0", "--lr_scheduler.decay_ratio=1"}), "no error");
}

TEST(Config, ChoicesAreListedWhenNoneFits) {
  const std::string message = toml_error("[optimizer]\nname = \"adamw\"\n");
  EXPECT_SAYS(message, "run.toml:2: optimizer.name: expected one of \"AdamW\", \"SGD\"");
  EXPECT_SAYS(message, "found the text \"adamw\"");
  EXPECT_SAYS(message, "Did you mean \"AdamW\"?");
  EXPECT_SAYS(override_error({"--parallelism.strategy=zero3"}), "one of \"fsdp\", \"ddp\"");
  EXPECT_SAYS(override_error({"--model.flavor=llama2_8b"}), "Did you mean \"llama2_7b\"?");
}

TEST(Config, TomlSyntaxErrorsComeWithLineAndColumn) {
  EXPECT_SAYS(toml_error("[training]\nsteps = \n"), "run.toml:2:");
  EXPECT_SAYS(toml_error("[training]\nsteps = \n"), "not valid TOML");
  EXPECT_SAYS(toml_error("[training]\nsteps = 1\nsteps = 2\n"), "run.toml:3:");
}

TEST(Config, ValidateChecksWhatKeysSayTogether) {
  EXPECT_SAYS(validate_error({"--model.n_heads=5"}), "n_heads");
  EXPECT_SAYS(validate_error({"--model.n_heads=4", "--model.n_kv_heads=3"}), "n_kv_heads");
  EXPECT_SAYS(validate_error({"--model.dim=12", "--model.n_heads=4"}), "even");
  EXPECT_SAYS(validate_error({"--training.steps=10", "--lr_scheduler.warmup_steps=11"}),
              "lr_scheduler.warmup_steps = 11 is more than training.steps = 10");
  EXPECT_EQ(validate_error({"--training.steps=10", "--lr_scheduler.warmup_steps=10"}), "no error");
  EXPECT_SAYS(validate_error({"--training.steps=10", "--lr_scheduler.warmup_steps=6",
                              "--lr_scheduler.decay_ratio=0.5"}),
              "decay_ratio");
  EXPECT_EQ(validate_error({"--training.steps=10", "--lr_scheduler.warmup_steps=5",
                            "--lr_scheduler.decay_ratio=0.5"}),
            "no error");
  EXPECT_SAYS(validate_error({"--training.local_batch_size=4", "--training.global_batch_size=6"}),
              "training.global_batch_size = 6 is not a multiple");
  EXPECT_SAYS(validate_error({"--training.global_batch_size=0"}), "not a multiple");
  EXPECT_SAYS(validate_error(
                  {"--parallelism.strategy=ddp", "--parallelism.fsdp_reshard_after_forward=never"}),
              "no effect");
  EXPECT_SAYS(validate_error({"--optimizer.momentum=0.9"}), "no effect");
  EXPECT_EQ(validate_error({"--optimizer.momentum=0.9", "--optimizer.name=SGD"}), "no error");
  EXPECT_SAYS(validate_error({"--sampling.sample_bytes=9", "--sampling.sample_prompt="}),
              "sample_prompt is empty");
  EXPECT_SAYS(validate_error({"--model.flavor=custom", "--model.dim=64"}), "model.n_layers");
}

TEST(Config, ModelIsTheFlavorWithWhatIsGivenOverIt) {
  JobConfig config;
  apply_overrides(config, {"--model.flavor=bench", "--training.seq_len=99"});
  LlamaConfig model = make_llama_config(config, 0);
  EXPECT_EQ(model.dim, 512);
  EXPECT_EQ(model.n_layers, 8);
  EXPECT_EQ(model.n_heads, 8);
  EXPECT_EQ(model.ffn_dim, 1376);
  EXPECT_EQ(model.max_seq_len, 99);
  EXPECT_EQ(model.init, "gpt");
  apply_overrides(config, {"--model.dim=256", "--model.n_layers=3", "--model.n_heads=16",
                           "--model.n_kv_heads=4", "--model.ffn_dim=100", "--model.vocab_size=500",
                           "--model.rope_theta=5e5", "--model.norm_eps=1e-6",
                           "--model.tied_embeddings=true", "--model.init=torch"});
  model = make_llama_config(config, 257);
  EXPECT_EQ(model.dim, 256);
  EXPECT_EQ(model.n_layers, 3);
  EXPECT_EQ(model.n_heads, 16);
  EXPECT_EQ(model.n_kv_heads, 4);
  EXPECT_EQ(model.ffn_dim, 100);
  EXPECT_EQ(model.vocab_size, 500);
  EXPECT_EQ(model.rope_theta, 5e5);
  EXPECT_EQ(model.norm_eps, 1e-6);
  EXPECT_TRUE(model.tied_embeddings);
  EXPECT_EQ(model.init, "torch");
}

TEST(Config, VocabularyHoldsTheData) {
  JobConfig config;
  const int64_t of_flavor = make_llama_config(config, 0).vocab_size;
  EXPECT_EQ(make_llama_config(config, of_flavor + 1).vocab_size, of_flavor + 1);
  EXPECT_EQ(make_llama_config(config, 10).vocab_size, of_flavor);
  config.model.vocab_size = 100;
  EXPECT_EQ(make_llama_config(config, 100).vocab_size, 100);
  EXPECT_SAYS(error_of([&] { make_llama_config(config, 101); }), "smaller than the data's");
}

TEST(Config, CustomModelNeedsEverySize) {
  JobConfig config;
  apply_overrides(config, {"--model.flavor=custom", "--model.dim=24", "--model.n_layers=1",
                           "--model.n_heads=3", "--model.ffn_dim=7"});
  EXPECT_SAYS(error_of([&] { make_llama_config(config, 0); }), "model.vocab_size is not set");
  config.model.vocab_size = 11;
  const LlamaConfig model = make_llama_config(config, 0);
  EXPECT_EQ(model.dim, 24);
  EXPECT_EQ(model.n_kv_heads, 3);
}

// Every key is changed, so that one which is printed or read wrongly is found.
TEST(Config, PrintedConfigReadsBackTheSame) {
  JobConfig config;
  for (const Key& key : config_keys()) {
    const Slot slot = key.slot(config);
    if (auto* const* text = std::get_if<std::string*>(&slot)) {
      if (key.choices.empty()) {
        **text = "quote \" slash \\ tab \t line \n bell \x07 end";
      } else {
        **text = **text == key.choices.back() ? key.choices.front() : key.choices.back();
      }
    } else if (auto* const* integer = std::get_if<int64_t*>(&slot)) {
      **integer += 3;
    } else if (auto* const* real = std::get_if<double*>(&slot)) {
      **real = **real / 3 + 1.0 / 7;
    } else if (auto* const* flag = std::get_if<std::optional<bool>*>(&slot)) {
      **flag = true;
    } else if (auto* const* maybe = std::get_if<std::optional<double>*>(&slot)) {
      **maybe = 1.0 / 3;
    }
  }
  JobConfig again;
  apply_toml(again, print_config(config), "printed");
  JobConfig defaults;
  for (const Key& key : config_keys()) {
    EXPECT_EQ(value_text(key, again), value_text(key, config)) << key.full_name();
    if (key.choices.size() != 1) {
      EXPECT_NE(value_text(key, config), value_text(key, defaults)) << key.full_name();
    }
  }
  EXPECT_EQ(again.optimizer.lr, config.optimizer.lr) << "to the last bit";
  EXPECT_EQ(again.job.description, config.job.description);
  EXPECT_EQ(print_config(again), print_config(config));

  JobConfig unset;
  apply_toml(unset, print_config(JobConfig()), "printed");
  EXPECT_FALSE(unset.model.tied_embeddings.has_value());
  EXPECT_EQ(print_config(unset), print_config(JobConfig()));
}

}  // namespace
}  // namespace tessera::apps
