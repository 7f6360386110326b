// The first thing to run: prepares a corpus from LibTorch's own C++ headers, trains a small Llama
// on two ranks, sharded and then replicated from the same seed, and shows that the loss curves
// agree.
//
// Started by `bazel run //apps:quickstart`, in the folder of its run files.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/stopwatch.h"
#include "data/prepare.h"
#include "launch/launcher.h"

namespace {

namespace fs = std::filesystem;

constexpr int64_t kRanks = 2;
constexpr int64_t kSteps = 250;
// Both strategies add the ranks' gradients in the same order, so the curves agree to the last bit
// printed.
constexpr double kTolerance = 1e-6;

// LibTorch's include folder, from one of its headers among the run files.
fs::path libtorch_include() {
  const fs::path header = fs::canonical("external/libtorch/torch/include/ATen/ATen.h");
  return header.parent_path().parent_path();
}

std::string output_folder() {
  // Set by `bazel run`: where the user called it.
  const char* workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  return std::string(workspace != nullptr ? workspace : ".") + "/runs/quickstart";
}

// Trains with one strategy and returns its loss by step.
std::map<int64_t, double> train(const std::string& strategy, const std::string& data,
                                const std::string& folder) {
  std::printf("\n== %s: %lld steps on %lld ranks\n", strategy.c_str(),
              static_cast<long long>(kSteps), static_cast<long long>(kRanks));
  std::fflush(stdout);
  const std::string metrics = folder + "/metrics.jsonl";
  fs::remove(metrics);
  tessera::launch::LaunchOptions options;
  options.nproc_per_node = kRanks;
  options.program = {fs::canonical("apps/tessera").string(),
                     "train",
                     "--job.dump_folder=" + folder,
                     "--model.flavor=quickstart",
                     "--training.dataset_path=" + data,
                     "--training.local_batch_size=8",
                     "--training.seq_len=128",
                     "--training.steps=" + std::to_string(kSteps),
                     "--training.threads=1",
                     "--parallelism.strategy=" + strategy,
                     "--optimizer.lr=3e-3",
                     "--lr_scheduler.warmup_steps=20",
                     "--lr_scheduler.decay_type=cosine",
                     "--metrics.log_freq=25",
                     "--sampling.sample_bytes=" + std::string(strategy == "fsdp" ? "300" : "0"),
                     "--sampling.sample_prompt=namespace at {\n"};
  const int code = tessera::launch::launch(options);
  if (code != 0) std::exit(code);  // The launcher has said why.
  std::map<int64_t, double> losses;
  std::ifstream in(metrics);
  for (std::string line; std::getline(in, line);) {
    const auto entry = nlohmann::json::parse(line);
    losses[entry.at("step").get<int64_t>()] = entry.at("loss").get<double>();
  }
  return losses;
}

int run() {
  const tessera::base::Stopwatch stopwatch;
  const std::string folder = output_folder();
  const fs::path include = libtorch_include();
  const std::string data = folder + "/data";
  std::printf("== corpus: LibTorch's C++ headers, as bytes\n");
  tessera::data::PrepareOptions options;
  options.extensions = {".h"};
  const tessera::data::PrepareResult corpus = tessera::data::prepare(
      {include / "ATen" / "core", include / "c10", include / "torch" / "csrc"}, data, options);
  std::printf("%lld files, %lld tokens in %s\n", static_cast<long long>(corpus.documents()),
              static_cast<long long>(corpus.train_tokens), data.c_str());
  const std::map<int64_t, double> sharded = train("fsdp", data, folder + "/fsdp");
  const std::map<int64_t, double> replicated = train("ddp", data, folder + "/ddp");

  std::printf(
      "\n== loss of the same training, sharded and replicated\n  step      fsdp       ddp\n");
  double largest = 0;
  for (const auto& [step, loss] : sharded) {
    const double other = replicated.at(step);
    largest = std::max(largest, std::abs(loss - other));
    std::printf("%6lld  %8.5f  %8.5f\n", static_cast<long long>(step), loss, other);
  }
  std::printf("largest difference: %.1e\n", largest);
  std::printf("files of both runs: %s\ntook %.0f s\n", folder.c_str(), stopwatch.seconds());
  if (largest > kTolerance) {
    std::fprintf(stderr,
                 "quickstart: the curves differ by more than %.0e: expected the same training in "
                 "both modes\n",
                 kTolerance);
    return 1;
  }
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "quickstart: error: %s\n", e.what());
    return 1;
  }
}
