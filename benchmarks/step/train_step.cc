// The time and memory of one training step of a Llama: alone, replicated or sharded. Rank 0 prints
// one line of JSON. Run it with the variables of torchrun, or in one process without any;
// benchmarks/compare.py sets them.
//
// Data and start values are those of the PyTorch program of the same flags: both draw them from
// seeded CPU generators, which agree, so that loss_rank0 of the two programs can be compared.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <sys/resource.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "apps/llama.h"
#include "base/allocator.h"
#include "base/error.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "benchmarks/step/plain_adamw.h"
#include "benchmarks/step/step_options.h"
#include "comm/world.h"
#include "optim/adamw.h"
#include "train/parallelize.h"

namespace tessera::benchmarks {
namespace {

constexpr double kLearningRate = 1e-3;
constexpr uint64_t kDataSeed = 1234;
constexpr size_t kNumLosses = 4;

// What differs between the modes.
struct Training {
  int64_t rank = 0;
  int64_t size = 1;
  std::function<void()> barrier = [] {};
  std::function<void(bool is_last, const std::function<void()>& body)> in_micro_batch;
  std::function<void()> clip;
  std::function<void()> update;
};

// CPU autocast to bf16 for the life of the guard, as torch.autocast("cpu", torch.bfloat16,
// enabled).
class AutocastGuard {
 public:
  explicit AutocastGuard(bool enabled)
      : was_enabled_(at::autocast::is_autocast_enabled(at::kCPU)),
        dtype_(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~AutocastGuard() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_dtype(at::kCPU, dtype_);
    at::autocast::set_autocast_enabled(at::kCPU, was_enabled_);
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  bool was_enabled_;
  at::ScalarType dtype_;
};

Training single(const apps::Llama& model, const StepOptions& options) {
  const comm::World world = comm::init();
  TESSERA_CHECK_CONFIG(world.size() == 1, "--mode single: expected one process, found ",
                       world.size(), ". Use ddp or fsdp for several ranks.");
  const auto adamw = std::make_shared<PlainAdamW>(model->parameters(), kLearningRate);
  Training training;
  training.in_micro_batch = [=](bool is_last, const std::function<void()>& body) {
    const AutocastGuard guard(options.param_dtype == "bf16");
    body();
  };
  training.clip = [=] { adamw->clip_grad_norm(options.clip); };
  training.update = [=] {
    adamw->step();
    adamw->zero_grad();
  };
  return training;
}

Training parallel(apps::Llama& model, const StepOptions& options) {
  const comm::World world = comm::init();
  base::set_log_rank(world.rank());
  Policy policy;
  policy.strategy = options.mode == "fsdp" ? Strategy::kFullShard : Strategy::kReplicate;
  policy.precision = precision::fp32();
  if (options.param_dtype == "bf16") {
    policy.precision = precision::bf16();
    policy.precision.reduce_dtype = options.reduce_dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  }
  policy.units = units_of<apps::Block>();
  policy.prefetch = options.prefetch;
  if (options.mode == "fsdp") policy.reshard_after_forward = options.reshard_after_forward;

  auto made = parallelize(model, world, policy);
  const auto engine = std::make_shared<decltype(made)>(std::move(made));
  optim::AdamWOptions adamw_options;  // the defaults of torch.optim.AdamW: every parameter decays
  adamw_options.lr = kLearningRate;
  adamw_options.decay_rule = optim::DecayRule::kAll;
  const auto adamw = std::make_shared<optim::AdamW>(engine->owned_params(), adamw_options);

  Training training;
  training.rank = world.rank();
  training.size = world.size();
  training.barrier = [=] { world.barrier(); };
  training.in_micro_batch = [=](bool is_last, const std::function<void()>& body) {
    auto sync = engine->sync_gradients(is_last);
    body();
  };
  training.clip = [=] { engine->clip_grad_norm(options.clip); };
  training.update = [=] {
    adamw->step();
    adamw->zero_grad();
  };
  return training;
}

// The seconds of the parts of one step.
struct Split {
  double forward = 0, backward = 0, clip = 0, update = 0, total = 0;
};

// Runs one step on `data` [accum, batch, seq + 1]; returns the loss of the last micro-batch.
double run_step(apps::Llama& model, const Training& training, const StepOptions& options,
                const at::Tensor& data, Split& split) {
  at::Tensor loss;
  for (int64_t i = 0; i < options.accum; ++i) {
    const at::Tensor tokens = data[i].narrow(1, 0, options.seq);
    const at::Tensor targets = data[i].narrow(1, 1, options.seq);
    training.in_micro_batch(i == options.accum - 1, [&] {
      base::Stopwatch watch;
      loss = apps::loss(model(tokens), targets) / options.accum;
      split.forward += watch.seconds();
      watch.restart();
      loss.backward();
      split.backward += watch.seconds();
    });
  }
  base::Stopwatch watch;
  if (options.clip > 0) training.clip();
  split.clip = watch.seconds();
  watch.restart();
  training.update();
  split.update = watch.seconds();
  return loss.item<double>() * static_cast<double>(options.accum);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double peak_rss_mb() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024.0;
}

// The medians over the timed steps, by part.
nlohmann::ordered_json stats(const std::vector<Split>& splits) {
  const std::pair<const char*, double Split::*> parts[] = {{"forward_s", &Split::forward},
                                                           {"backward_s", &Split::backward},
                                                           {"clip_s", &Split::clip},
                                                           {"optimizer_s", &Split::update}};
  nlohmann::ordered_json out;
  for (const auto& [name, part] : parts) {
    std::vector<double> values;
    for (const Split& split : splits) values.push_back(split.*part);
    out[name] = median(values);
  }
  return out;
}

void report(const Training& training, const StepOptions& options, const std::vector<Split>& splits,
            const std::vector<double>& losses) {
  const std::vector<Split> timed(splits.begin() + options.warmup, splits.end());
  std::vector<double> totals;
  for (const Split& split : timed) totals.push_back(split.total);
  nlohmann::ordered_json out;
  out["mode"] = options.mode;
  out["world"] = training.size;
  out["params"] = apps::num_params(llama_config(options));
  out["dtype"] = options.param_dtype;
  out["accum"] = options.accum;
  out["median_s"] = median(totals);
  out["min_s"] = *std::min_element(totals.begin(), totals.end());
  out["peak_rss_mb"] = peak_rss_mb();
  out["loss_rank0"] = std::vector<double>(
      losses.begin(), losses.begin() + std::min<int64_t>(kNumLosses, losses.size()));
  if (options.stats) out["stats"] = stats(timed);
  std::printf("%s\n", out.dump().c_str());
}

int run(const StepOptions& options) {
  at::set_num_threads(options.threads);
  torch::manual_seed(0);
  apps::Llama model(llama_config(options));
  const Training training =
      options.mode == "single" ? single(model, options) : parallel(model, options);
  const at::Generator generator =
      at::make_generator<at::CPUGeneratorImpl>(kDataSeed + training.rank);

  std::vector<Split> splits(options.steps);
  std::vector<double> losses;
  for (Split& split : splits) {
    const at::Tensor data =
        at::randint(options.vocab, {options.accum, options.batch, options.seq + 1}, generator,
                    at::TensorOptions(at::kLong));
    training.barrier();
    const base::Stopwatch watch;
    const double loss = run_step(model, training, options, data, split);
    training.barrier();
    split.total = watch.seconds();
    losses.push_back(std::round(loss * 1e6) / 1e6);
  }
  if (training.rank == 0) report(training, options, splits, losses);
  return 0;
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  try {
    tessera::base::keep_freed_memory();  // As `tessera train` does; in all modes.
    return tessera::benchmarks::run(tessera::benchmarks::parse_step_options(argc, argv));
  } catch (const std::exception& error) {
    tessera::base::log_error(error.what());
    return 1;
  }
}
