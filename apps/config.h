#ifndef APPS_CONFIG_H_
#define APPS_CONFIG_H_

// The configuration of `tessera train`: defaults, then a TOML file, then overrides from the command
// line (--section.key=value or --section.key value), each over the one before.
//
// Keys have torchtitan's names where torchtitan has them. Every key is one row of the table in
// apps/config_keys.cc, from which reading, overriding, help and printing follow: a key that is not
// there does not exist.
//
// Errors: all functions: ConfigError, naming key, place (file and line, or the argument), what was
//         found and what is allowed; for an unknown name also the nearest known one.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/llama_config.h"

namespace tessera::apps {

struct JobSection {
  std::string dump_folder = "runs/default";
  std::string description;
};

// Numbers of 0 and an unset flag mean: as the flavor has it. See make_llama_config().
struct ModelSection {
  std::string name = "llama";
  std::string flavor = "debug";
  int64_t dim = 0;
  int64_t n_layers = 0;
  int64_t n_heads = 0;
  int64_t n_kv_heads = 0;
  int64_t ffn_dim = 0;
  int64_t vocab_size = 0;
  double rope_theta = 0;
  double norm_eps = 0;
  std::optional<bool> tied_embeddings;
  std::string init = "gpt";
};

struct TrainingSection {
  std::string dataset_path;
  int64_t local_batch_size = 8;
  int64_t global_batch_size = -1;  // -1: local_batch_size x world size, no accumulation
  int64_t seq_len = 256;
  double max_norm = 1.0;
  int64_t steps = 1000;
  std::string mixed_precision_param = "float32";
  std::string mixed_precision_reduce = "float32";
  int64_t threads = 0;
};

struct ParallelismSection {
  std::string strategy = "fsdp";
  std::string fsdp_reshard_after_forward = "default";
  double ddp_bucket_mb = 25;
};

struct OptimizerSection {
  std::string name = "AdamW";
  double lr = 8e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0;
};

struct LrSchedulerSection {
  int64_t warmup_steps = 0;
  std::optional<double> decay_ratio;  // unset: all steps after the warm-up
  std::string decay_type = "linear";
  double min_lr_factor = 0;
};

struct MetricsSection {
  int64_t log_freq = 10;
  double peak_flops = 0;
};

struct CommSection {
  int64_t init_timeout_seconds = 300;
  int64_t train_timeout_seconds = 100;
};

struct SamplingSection {
  int64_t sample_bytes = 0;
  std::string sample_prompt = "\n";
};

struct DebugSection {
  int64_t seed = 0;
};

struct JobConfig {
  JobSection job;
  ModelSection model;
  TrainingSection training;
  ParallelismSection parallelism;
  OptimizerSection optimizer;
  LrSchedulerSection lr_scheduler;
  MetricsSection metrics;
  CommSection comm;
  SamplingSection sampling;
  DebugSection debug;
};

// Defaults, then the file (unless its path is ""), then the overrides in their order. Checks each
// value by itself; call validate() next.
JobConfig load_config(const std::string& toml_path, const std::vector<std::string>& overrides);

// Sets what `text` has; `source` stands for the file's name in messages.
void apply_toml(JobConfig& config, const std::string& text, const std::string& source);

// `arguments`: "--section.key=value", or "--section.key" followed by its value as an argument of
// its own.
void apply_overrides(JobConfig& config, const std::vector<std::string>& arguments);

// Checks what several keys say together, and that the model can be built.
void validate(const JobConfig& config);

// The model: the flavor with what the user gave over it, for sequences of training.seq_len. Where
// model.vocab_size is not given, the vocabulary is the larger of the flavor's and `data_vocab_size`
// (0: not known yet).
// Errors: also for flavor "custom" with a size missing, for sizes that make no model, and for a
//         given vocabulary that is smaller than the data's.
LlamaConfig make_llama_config(const JobConfig& config, int64_t data_vocab_size);

// All keys as a TOML file that apply_toml() reads back to the same configuration; keys that are not
// set as comments.
std::string print_config(const JobConfig& config);

// All keys with type, default, range and meaning, section by section.
std::string config_help();

}  // namespace tessera::apps

#endif  // APPS_CONFIG_H_
