// The host time that an engine adds per unit and step, communication excluded: a deep stack of tiny
// blocks on a world whose groups move nothing, so that what is left is the engine's own work.
// Prints one line of JSON: microseconds per unit and step of the plain model and of the parallel
// one, for forward and backward and for the optimizer, and the difference. Units are blocks; the
// time of the root, which has no parameters of its own, is spread over them.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/stopwatch.h"
#include "benchmarks/step/plain_adamw.h"
#include "comm/world.h"
#include "engine/module_hook.h"
#include "optim/adamw.h"
#include "train/parallelize.h"

namespace tessera::benchmarks {
namespace {

constexpr int64_t kNumWarmup = 5;
constexpr int64_t kNumLinears = 7;
constexpr double kLearningRate = 1e-3;

struct Options {
  std::string mode = "fsdp";
  int world = 512;
  int64_t units = 64;
  int64_t dim = 16;
  int64_t steps = 20;
  bool bf16 = false;
};

// The nine parameters of a Llama block, tiny.
class TinyBlockImpl : public torch::nn::Module {
 public:
  explicit TinyBlockImpl(int64_t dim) {
    torch::nn::ModuleList list;
    for (int64_t i = 0; i < kNumLinears; ++i) {
      linears_.emplace_back(torch::nn::LinearOptions(dim, dim).bias(false));
      list->push_back(linears_.back());
    }
    register_module("lin", list);
    n1_ = register_parameter("n1", at::ones({dim}));
    n2_ = register_parameter("n2", at::ones({dim}));
  }

  at::Tensor forward(at::Tensor x) {
    x = x * n1_;
    for (auto& linear : linears_) x = linear(x);
    return x * n2_;
  }

 private:
  std::vector<torch::nn::Linear> linears_;
  at::Tensor n1_, n2_;
};
TESSERA_MODULE(TinyBlock);

class StackImpl : public torch::nn::Module {
 public:
  StackImpl(int64_t units, int64_t dim) {
    for (int64_t i = 0; i < units; ++i) {
      blocks_.push_back(register_module(std::to_string(i), TinyBlock(dim)));
    }
  }

  at::Tensor forward(at::Tensor x) {
    for (TinyBlock& block : blocks_) x = block(x);
    return x;
  }

 private:
  std::vector<TinyBlock> blocks_;
};
TESSERA_MODULE(Stack);

Stack make_stack(const Options& options) {
  torch::manual_seed(0);
  return Stack(options.units, options.dim);
}

// Microseconds per unit and step, medians.
struct Times {
  double pass_us = 0;  // forward and backward
  double optimizer_us = 0;
};

double median_us(std::vector<double> seconds, int64_t units) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2] / static_cast<double>(units) * 1e6;
}

Times measure(Stack& model, const Options& options, const std::function<void()>& update) {
  const at::Tensor x = at::randn({1, options.dim});
  std::vector<double> passes, updates;
  for (int64_t i = 0; i < options.steps; ++i) {
    base::Stopwatch watch;
    model(x).sum().backward();
    const double pass = watch.seconds();
    watch.restart();
    update();
    const double optimizer = watch.seconds();
    if (i < kNumWarmup) continue;
    passes.push_back(pass);
    updates.push_back(optimizer);
  }
  return {median_us(passes, options.units), median_us(updates, options.units)};
}

Times measure_plain(const Options& options) {
  Stack model = make_stack(options);
  PlainAdamW adamw(model->parameters(), kLearningRate);
  return measure(model, options, [&] {
    adamw.step();
    adamw.zero_grad();
  });
}

Times measure_parallel(const Options& options) {
  Stack model = make_stack(options);
  const comm::World world = comm::fake_world(/*rank=*/0, options.world);
  Policy policy;
  policy.strategy = options.mode == "fsdp" ? Strategy::kFullShard : Strategy::kReplicate;
  policy.precision = options.bf16 ? precision::bf16() : precision::fp32();
  policy.units = units_of<TinyBlock>();
  auto parallel = parallelize(model, world, policy);
  optim::AdamWOptions adamw_options;  // the defaults of torch.optim.AdamW: every parameter decays
  adamw_options.lr = kLearningRate;
  adamw_options.decay_rule = optim::DecayRule::kAll;
  optim::AdamW adamw(parallel.owned_params(), adamw_options);
  return measure(model, options, [&] {
    adamw.step();
    adamw.zero_grad();
  });
}

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("The host time that the engine adds per unit and step.", "host_overhead");
  app.add_option("--mode", options.mode)
      ->check(CLI::IsMember({"fsdp", "ddp"}))
      ->capture_default_str();
  app.add_option("--world", options.world)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--units", options.units)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--dim", options.dim)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", options.steps, "the first 5 are not timed")->capture_default_str();
  app.add_option("--bf16", options.bf16)->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  TESSERA_CHECK_CONFIG(options.steps > kNumWarmup, "expected --steps > ", kNumWarmup, ", found ",
                       options.steps, ": the first ", kNumWarmup, " are not timed.");
  return options;
}

int run(const Options& options) {
  at::set_num_threads(1);
  const auto tenths = [](double value) { return std::round(value * 10) / 10; };
  const Times plain = measure_plain(options);
  const Times parallel = measure_parallel(options);
  nlohmann::ordered_json out;
  out["world"] = options.world;
  out["units"] = options.units;
  out["plain_us"] = tenths(plain.pass_us);
  out["plain_opt_us"] = tenths(plain.optimizer_us);
  out[options.mode + "_us"] = tenths(parallel.pass_us);
  out[options.mode + "_opt_us"] = tenths(parallel.optimizer_us);
  out[options.mode + "_added_us"] = tenths(parallel.pass_us - plain.pass_us);
  std::printf("%s\n", out.dump().c_str());
  return 0;
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  try {
    return tessera::benchmarks::run(tessera::benchmarks::parse(argc, argv));
  } catch (const std::exception& error) {
    tessera::base::log_error(error.what());
    return 1;
  }
}
