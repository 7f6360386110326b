#include "apps/train_command.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "apps/flops.h"
#include "apps/llama.h"
#include "apps/sampling.h"
#include "base/allocator.h"
#include "base/error.h"
#include "base/log.h"
#include "base/resident_memory.h"
#include "comm/agreement.h"
#include "comm/world.h"
#include "data/loader.h"
#include "optim/adamw.h"
#include "optim/sgd.h"
#include "train/metrics.h"
#include "train/parallelize.h"
#include "train/trainer.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;

// A dataset as `tessera prepare` wrote it, or one token file.
struct Dataset {
  std::string path;        // of the token file
  int64_t vocab_size = 0;  // 0: not known
};

Dataset find_dataset(const std::string& path) {
  TESSERA_CHECK_CONFIG(fs::exists(path), "training.dataset_path '", path,
                       "': no such file or folder. Make one with "
                       "`tessera prepare --output ",
                       path, " PATH...`.");
  const bool is_folder = fs::is_directory(path);
  const std::string folder = is_folder ? path : fs::path(path).parent_path().string();
  const std::string meta_path = (fs::path(folder) / "meta.json").string();
  // A single file may be one of such a folder.
  if (!is_folder && !fs::exists(meta_path)) return {path, 0};
  std::ifstream in(meta_path);
  TESSERA_CHECK_CONFIG(in.good(), "training.dataset_path '", path,
                       "': expected meta.json in it, found none. Make the folder with "
                       "`tessera prepare --output ",
                       path, " PATH...`.");
  try {
    const auto vocab_size = nlohmann::json::parse(in).at("vocab_size").get<int64_t>();
    TESSERA_CHECK_CONFIG(vocab_size >= 1 && vocab_size <= 65536, "'", meta_path,
                         "' is damaged: ", "vocab_size is ", vocab_size,
                         ", expected 1 to 65536. Run `tessera ", "prepare` again.");
    return {is_folder ? path + "/train.bin" : path, vocab_size};
  } catch (const nlohmann::json::exception& e) {
    throw ConfigError(
        base::str("'", meta_path, "' is damaged (", e.what(), "). Run `tessera prepare` again."));
  }
}

at::ScalarType dtype_of(const std::string& name) {
  return name == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

Policy policy_of(const JobConfig& config) {
  Policy policy;
  policy.strategy = train::strategy_of(config.parallelism.strategy);
  policy.precision =
      config.training.mixed_precision_param == "bfloat16" ? precision::bf16() : precision::fp32();
  policy.precision.reduce_dtype = dtype_of(config.training.mixed_precision_reduce);
  policy.units = units_of<Block>();
  const std::string& reshard = config.parallelism.fsdp_reshard_after_forward;
  if (reshard != "default") policy.reshard_after_forward = reshard == "always";
  policy.bucket_bytes = static_cast<int64_t>(config.parallelism.ddp_bucket_mb * (1 << 20));
  policy.first_bucket_bytes = std::min(policy.first_bucket_bytes, policy.bucket_bytes);
  return policy;
}

int64_t micro_batches_of(const JobConfig& config, const comm::World& world) {
  const int64_t at_once = config.training.local_batch_size * world.size();
  const int64_t global = config.training.global_batch_size;
  if (global == -1) return 1;
  TESSERA_CHECK_CONFIG(
      global >= at_once && global % at_once == 0, "training.global_batch_size = ", global,
      ": expected a multiple of local_batch_size x ranks = ", config.training.local_batch_size,
      " x ", world.size(), " = ", at_once, ".");
  return global / at_once;
}

optim::LrSchedule lr_schedule_of(const JobConfig& config) {
  const LrSchedulerSection& section = config.lr_scheduler;
  optim::LrSchedule schedule;
  schedule.base_lr = config.optimizer.lr;
  schedule.warmup_steps = section.warmup_steps;
  schedule.total_steps = config.training.steps;
  if (section.decay_ratio) {
    // As torchtitan: a decay that would begin before the warm-up's end begins there.
    schedule.decay_steps =
        std::min(static_cast<int64_t>(std::llround(*section.decay_ratio *
                                                   static_cast<double>(schedule.total_steps))),
                 schedule.total_steps - schedule.warmup_steps);
  }
  schedule.decay_type =
      section.decay_type == "cosine" ? optim::DecayType::kCosine : optim::DecayType::kLinear;
  schedule.min_lr_factor = section.min_lr_factor;
  return schedule;
}

// The optimizer of the configuration as what the trainer calls.
train::Trainer::Update update_of(const OptimizerSection& section,
                                 const std::vector<OwnedParam>& params) {
  const auto updating = [](auto optimizer) {
    return [optimizer](double lr) {
      optimizer->set_lr(lr);
      optimizer->step();
      optimizer->zero_grad();
    };
  };
  if (section.name == "SGD") {
    optim::SGDOptions options;
    options.lr = section.lr;
    options.momentum = section.momentum;
    options.weight_decay = section.weight_decay;
    return updating(std::make_shared<optim::SGD>(params, options));
  }
  optim::AdamWOptions options;
  options.lr = section.lr;
  options.beta1 = section.beta1;
  options.beta2 = section.beta2;
  options.eps = section.eps;
  options.weight_decay = section.weight_decay;
  return updating(std::make_shared<optim::AdamW>(params, options));
}

void print_sample(const JobConfig& config, const comm::World& world, Llama model) {
  SampleOptions options;
  options.num_bytes = config.sampling.sample_bytes;
  options.temperature = 0.8;
  options.top_k = 40;
  options.seed = static_cast<uint64_t>(config.debug.seed);
  const std::string text = sample(std::move(model), config.sampling.sample_prompt, options);
  if (world.rank() == 0)
    std::cout << "sample: " << escape(config.sampling.sample_prompt + text) << std::endl;
}

}  // namespace

int run_train(const JobConfig& config) {
  base::keep_freed_memory();
  comm::Options comm_options;
  comm_options.init_timeout = std::chrono::seconds(config.comm.init_timeout_seconds);
  comm_options.train_timeout = std::chrono::seconds(config.comm.train_timeout_seconds);
  const comm::World world = comm::init(comm_options);
  const bool is_first = world.rank() == 0;
  comm::check_same(world, "the configuration", print_config(config));
  if (config.training.threads > 0) at::set_num_threads(static_cast<int>(config.training.threads));

  // What each rank can find wrong by itself, before the first collective of the model.
  std::optional<LlamaConfig> model_config;
  std::unique_ptr<data::Loader> loader;
  std::unique_ptr<train::MetricsWriter> metrics;
  train::TrainerOptions options;
  comm::all_or_none(world, [&] {
    const Dataset dataset = find_dataset(config.training.dataset_path);
    model_config = make_llama_config(config, dataset.vocab_size);
    const double needed = 4.0 * static_cast<double>(num_params(*model_config));
    TESSERA_CHECK_CONFIG(needed < static_cast<double>(base::machine_memory_bytes()),
                         "the model of [model] has ", num_params(*model_config), " parameters, ",
                         needed / (1 << 30),
                         " GiB, and every rank builds it whole before it is "
                         "sharded: more than this machine's memory. Choose a smaller flavor, dim, "
                         "n_layers or vocab_size.");
    data::LoaderOptions loader_options;
    loader_options.seq_len = config.training.seq_len;
    loader_options.batch_size = config.training.local_batch_size;
    loader_options.world = world.size();
    loader_options.rank = world.rank();
    loader_options.seed = static_cast<uint64_t>(config.debug.seed);
    loader_options.vocab_size = model_config->vocab_size;
    loader = std::make_unique<data::Loader>(data::TokenFile(dataset.path), loader_options);
    options.micro_batches = micro_batches_of(config, world);
    if (is_first) metrics = std::make_unique<train::MetricsWriter>(config.job.dump_folder);
  });
  options.steps = config.training.steps;
  options.max_norm = config.training.max_norm;
  options.log_freq = config.metrics.log_freq;
  options.lr_schedule = lr_schedule_of(config);
  options.flops_per_token =
      static_cast<double>(flops_per_token(*model_config, config.training.seq_len));
  options.peak_flops = config.metrics.peak_flops;

  torch::manual_seed(static_cast<uint64_t>(config.debug.seed));
  Llama model(*model_config);
  Parallel parallel = parallelize(model, world, policy_of(config));
  if (is_first) {
    if (!config.job.description.empty()) base::log_info(config.job.description);
    base::log_info(base::str(
        config.parallelism.strategy, " on ", world.size(), " ranks: ", parallel.num_parameters(),
        " parameters in ", parallel.units().size(), " units; ", loader->num_samples(),
        " samples of ", config.training.seq_len, " tokens, ",
        config.training.local_batch_size * world.size() * options.micro_batches,
        " a step; metrics in ", metrics->path()));
  }
  train::Trainer trainer(
      world, parallel, *loader,
      [&](const data::Batch& batch) { return loss(model->forward(batch.tokens), batch.targets); },
      update_of(config.optimizer, parallel.owned_params()),
      [&](const train::StepMetrics& step) {
        if (metrics) metrics->write(step);
      },
      options);
  trainer.run();
  if (config.sampling.sample_bytes > 0) print_sample(config, world, model);
  world.barrier();  // Rank 0 serves the store: it leaves last.
  return 0;
}

}  // namespace tessera::apps
