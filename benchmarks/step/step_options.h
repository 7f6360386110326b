#ifndef BENCHMARKS_STEP_STEP_OPTIONS_H_
#define BENCHMARKS_STEP_STEP_OPTIONS_H_

// The command line of train_step. The flags and their defaults are those of the PyTorch program it
// is compared with;
// --prefetch and --stats are its own. No torch.

#include <cstdint>
#include <string>

#include "apps/llama_config.h"

namespace tessera::benchmarks {

struct StepOptions {
  std::string mode = "fsdp";  // single (no Tessera engine), ddp, fsdp
  int64_t dim = 512;
  int64_t layers = 8;
  int64_t heads = 8;
  int64_t kv_heads = 8;
  int64_t ffn = 1376;
  int64_t vocab = 8192;
  int64_t seq = 128;
  int64_t batch = 2;  // sequences a rank and micro-batch
  int64_t accum = 1;
  int64_t steps = 12;
  int64_t warmup = 3;  // steps at the start that are not timed
  std::string param_dtype = "fp32";
  std::string reduce_dtype = "fp32";
  bool reshard_after_forward = true;
  double clip = 1.0;  // 0: no clipping
  int threads = 1;
  bool prefetch = true;
  bool stats = false;  // add the time split of the rank to the output
};

// The options of this command line. For --help and flags it does not know, prints and ends the
// process, as CLI11 does.
//
// Errors: ConfigError where the numbers make no run.
StepOptions parse_step_options(int argc, char** argv);

apps::LlamaConfig llama_config(const StepOptions& options);

}  // namespace tessera::benchmarks

#endif  // BENCHMARKS_STEP_STEP_OPTIONS_H_
