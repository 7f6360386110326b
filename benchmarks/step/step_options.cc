#include "benchmarks/step/step_options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "base/error.h"

namespace tessera::benchmarks {

StepOptions parse_step_options(int argc, char** argv) {
  StepOptions options;
  CLI::App app("One training step of a Llama: prints a line of JSON from rank 0.", "train_step");
  const auto dtype = CLI::IsMember({"fp32", "bf16"});
  app.add_option("--mode", options.mode)
      ->check(CLI::IsMember({"single", "ddp", "fsdp"}))
      ->capture_default_str();
  app.add_option("--dim", options.dim)->capture_default_str();
  app.add_option("--layers", options.layers)->capture_default_str();
  app.add_option("--heads", options.heads)->capture_default_str();
  app.add_option("--kv-heads", options.kv_heads)->capture_default_str();
  app.add_option("--ffn", options.ffn)->capture_default_str();
  app.add_option("--vocab", options.vocab)->capture_default_str();
  app.add_option("--seq", options.seq)->capture_default_str();
  app.add_option("--batch", options.batch, "sequences a rank and micro-batch")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--accum", options.accum)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--warmup", options.warmup)->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--param-dtype", options.param_dtype)->check(dtype)->capture_default_str();
  app.add_option("--reduce-dtype", options.reduce_dtype, "only with --param-dtype bf16")
      ->check(dtype)
      ->capture_default_str();
  app.add_option("--reshard-after-forward", options.reshard_after_forward)->capture_default_str();
  app.add_option("--clip", options.clip, "0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--threads", options.threads)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--prefetch", options.prefetch)->capture_default_str();
  app.add_option("--stats", options.stats, "add the time split")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  TESSERA_CHECK_CONFIG(options.steps > options.warmup, "expected --steps > --warmup, found ",
                       options.steps, " and ", options.warmup, ": no step would be timed.");
  apps::check(llama_config(options));
  return options;
}

apps::LlamaConfig llama_config(const StepOptions& options) {
  apps::LlamaConfig config;
  config.vocab_size = options.vocab;
  config.dim = options.dim;
  config.n_layers = options.layers;
  config.n_heads = options.heads;
  config.n_kv_heads = options.kv_heads;
  config.ffn_dim = options.ffn;
  config.max_seq_len = options.seq;
  return config;
}

}  // namespace tessera::benchmarks
