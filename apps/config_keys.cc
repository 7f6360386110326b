#include "apps/config_keys.h"

#include <charconv>
#include <cstdio>
#include <type_traits>

#include "apps/llama_config.h"

namespace tessera::apps {
namespace {

constexpr Range at_least(double low) { return {low, std::numeric_limits<double>::infinity()}; }
constexpr Range above(double low) {
  return {low, std::numeric_limits<double>::infinity(), /*above_low=*/true};
}
constexpr Range between(double low, double high) { return {low, high}; }
// [0, 1)
constexpr Range decay_rate() { return {0, 1, /*above_low=*/false, /*below_high=*/true}; }

// A day; longer waits are typing errors.
constexpr Range timeout_range() { return {1, 86400}; }

// TOML's basic string.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (c == '\n') {
      result += "\\n";
    } else if (c == '\t') {
      result += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04X", byte);
      result += escape;
    } else {
      result += c;
    }
  }
  return result + '"';
}

// The shortest text that reads back as the same number.
template <typename Number>
std::string number_text(Number value) {
  char text[64];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

std::string range_text(const Range& range) {
  std::string text;
  if (range.low != -std::numeric_limits<double>::infinity()) {
    text += (range.above_low ? " > " : " >= ") + number_text(range.low);
  }
  if (range.high != std::numeric_limits<double>::infinity()) {
    text += (text.empty() ? "" : " and") + std::string(range.below_high ? " < " : " <= ") +
            number_text(range.high);
  }
  return text;
}

}  // namespace

const std::vector<Section>& config_sections() {
  static const std::vector<Section> sections = {
      {"job", "the run as a whole"},
      {"model", "what is trained: a flavor, and sizes over it (0 = the flavor's)"},
      {"training", "data, batches, precision"},
      {"parallelism", "how the model is spread over the ranks"},
      {"optimizer", "how parameters are updated"},
      {"lr_scheduler", "the learning rate: linear warm-up, constant, decay"},
      {"metrics", "what is reported"},
      {"comm", "how long ranks wait for each other"},
      {"sampling", "text from the trained model"},
      {"debug", "reproducing a run"},
  };
  return sections;
}

// A row's names are those of the member, so that they cannot differ.
#define TESSERA_KEY(section, name) \
#section, #name, [](JobConfig & config) -> Slot { return &config.section.name; }

const std::vector<Key>& config_keys() {
  static const std::vector<std::string> dtypes = {"float32", "bfloat16"};
  static const std::vector<std::string> flavors = [] {
    std::vector<std::string> names = llama_flavor_names();
    names.push_back("custom");
    return names;
  }();
  static const std::vector<Key> keys = {
      {TESSERA_KEY(job, dump_folder), "folder for metrics and other results", {}, {}},
      {TESSERA_KEY(job, description), "a note to yourself, printed at the start", {}, {}},

      {TESSERA_KEY(model, name), "the model's family", {}, {"llama"}},
      {TESSERA_KEY(model, flavor),
       "a set of sizes; with \"custom\" you give dim, n_layers, n_heads, ffn_dim and vocab_size",
       {},
       flavors},
      {TESSERA_KEY(model, dim), "width of the residual stream", at_least(0), {}},
      {TESSERA_KEY(model, n_layers), "number of blocks", at_least(0), {}},
      {TESSERA_KEY(model, n_heads), "attention heads; divides dim", at_least(0), {}},
      {TESSERA_KEY(model, n_kv_heads), "key and value heads; divides n_heads", at_least(0), {}},
      {TESSERA_KEY(model, ffn_dim), "width inside the feed-forward part", at_least(0), {}},
      {TESSERA_KEY(model, vocab_size),
       "number of tokens (0 = the larger of the flavor's and the data's)",
       at_least(0),
       {}},
      {TESSERA_KEY(model, rope_theta), "base of the rotary embedding", at_least(0), {}},
      {TESSERA_KEY(model, norm_eps), "epsilon of RMSNorm", at_least(0), {}},
      {TESSERA_KEY(model, tied_embeddings),
       "input embedding and output layer share one parameter (unset = the flavor's)",
       {},
       {}},
      {TESSERA_KEY(model, init),
       "initial weights: torch = torch::nn's defaults, gpt = small normal ones (GPT-2)",
       {},
       {"torch", "gpt"}},

      {TESSERA_KEY(training, dataset_path),
       "folder made by `tessera prepare`, or a .bin token file",
       {},
       {}},
      {TESSERA_KEY(training, local_batch_size),
       "sequences per rank and micro-batch",
       at_least(1),
       {}},
      {TESSERA_KEY(training, global_batch_size),
       "sequences per step over all ranks: a multiple of local_batch_size x ranks, the rest is "
       "gradient accumulation (-1 = local_batch_size x ranks)",
       at_least(-1),
       {}},
      {TESSERA_KEY(training, seq_len), "tokens per sequence", at_least(1), {}},
      {TESSERA_KEY(training, max_norm), "gradients are clipped to this norm", above(0), {}},
      {TESSERA_KEY(training, steps), "optimizer steps", at_least(1), {}},
      {TESSERA_KEY(training, mixed_precision_param),
       "dtype of parameters in forward and backward; masters are float32",
       {},
       dtypes},
      {TESSERA_KEY(training, mixed_precision_reduce),
       "dtype in which gradients are summed over the ranks",
       {},
       dtypes},
      {TESSERA_KEY(training, threads),
       "compute threads per rank (0 = OMP_NUM_THREADS, or all cores)",
       between(0, 4096),
       {}},

      {TESSERA_KEY(parallelism, strategy),
       "fsdp: parameters, gradients and optimizer state are sharded; ddp: replicated",
       {},
       {"fsdp", "ddp"}},
      {TESSERA_KEY(parallelism, fsdp_reshard_after_forward),
       "fsdp: free full parameters after forward; default = as the strategy itself does",
       {},
       {"default", "always", "never"}},
      {TESSERA_KEY(parallelism, ddp_bucket_mb), "ddp: MiB of a gradient bucket", above(0), {}},

      {TESSERA_KEY(optimizer, name), "the update rule", {}, {"AdamW", "SGD"}},
      {TESSERA_KEY(optimizer, lr), "learning rate after the warm-up", at_least(0), {}},
      {TESSERA_KEY(optimizer, beta1), "AdamW: decay of the mean", decay_rate(), {}},
      {TESSERA_KEY(optimizer, beta2), "AdamW: decay of the mean square", decay_rate(), {}},
      {TESSERA_KEY(optimizer, eps), "AdamW: added to the denominator", at_least(0), {}},
      {TESSERA_KEY(optimizer, weight_decay), "weight decay", at_least(0), {}},
      {TESSERA_KEY(optimizer, momentum), "SGD: momentum", decay_rate(), {}},

      {TESSERA_KEY(lr_scheduler, warmup_steps), "steps from 0 up to lr", at_least(0), {}},
      {TESSERA_KEY(lr_scheduler, decay_ratio),
       "part of all steps in which the rate decays, at the end (unset = all after the warm-up)",
       between(0, 1),
       {}},
      {TESSERA_KEY(lr_scheduler, decay_type), "shape of the decay", {}, {"linear", "cosine"}},
      {TESSERA_KEY(lr_scheduler, min_lr_factor),
       "the rate ends at this part of lr",
       between(0, 1),
       {}},

      {TESSERA_KEY(metrics, log_freq), "steps between two lines of metrics", at_least(1), {}},
      {TESSERA_KEY(metrics, peak_flops),
       "peak FLOP/s of one rank's device in the compute dtype, for mfu (0 = unknown: mfu N/A)",
       at_least(0),
       {}},

      {TESSERA_KEY(comm, init_timeout_seconds),
       "longest wait for all ranks to meet",
       timeout_range(),
       {}},
      {TESSERA_KEY(comm, train_timeout_seconds),
       "longest wait for the other ranks in training",
       timeout_range(),
       {}},

      {TESSERA_KEY(sampling, sample_bytes),
       "print a sample of this many bytes at the end (0 = none)",
       at_least(0),
       {}},
      {TESSERA_KEY(sampling, sample_prompt), "the text that the sample continues", {}, {}},

      {TESSERA_KEY(debug, seed),
       "of initial weights, shuffling and sampling",
       between(0, 9007199254740992.0),  // 2^53
       {}},
  };
  return keys;
}

#undef TESSERA_KEY

std::string describe_allowed(const Key& key) {
  if (!key.choices.empty()) {
    std::string text;
    for (const std::string& choice : key.choices) {
      text += (text.empty() ? "one of " : ", ") + quoted(choice);
    }
    return text;
  }
  JobConfig any;
  return std::visit(
      [&](auto* value) -> std::string {
        using Type = std::decay_t<decltype(*value)>;
        if constexpr (std::is_same_v<Type, int64_t>) {
          return "an integer" + range_text(key.range);
        } else if constexpr (std::is_same_v<Type, std::string>) {
          return "text";
        } else if constexpr (std::is_same_v<Type, std::optional<bool>>) {
          return "true or false";
        } else {
          return "a number" + range_text(key.range);
        }
      },
      key.slot(any));
}

std::string value_text(const Key& key, const JobConfig& config) {
  const auto text_of = [](const auto& value) -> std::string {
    using Type = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Type, std::string>) {
      return quoted(value);
    } else if constexpr (std::is_same_v<Type, bool>) {
      return value ? "true" : "false";
    } else {
      return number_text(value);
    }
  };
  JobConfig copy = config;
  return std::visit(
      [&](auto* value) -> std::string {
        using Type = std::decay_t<decltype(*value)>;
        if constexpr (std::is_same_v<Type, std::optional<bool>> ||
                      std::is_same_v<Type, std::optional<double>>) {
          return value->has_value() ? text_of(**value) : "";
        } else {
          return text_of(*value);
        }
      },
      key.slot(copy));
}

}  // namespace tessera::apps
