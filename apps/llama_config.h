#ifndef APPS_LLAMA_CONFIG_H_
#define APPS_LLAMA_CONFIG_H_

// The sizes of a Llama, and what follows from them without building it. No torch: command lines and
// launchers use it.
//
// Source: LLaMA (Touvron et al., 2023) table 2; Llama 2 (2023) table 1; Llama 3 (2024) table 3.

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::apps {

struct LlamaConfig {
  int64_t vocab_size = 256;
  int64_t dim = 64;
  int64_t n_layers = 2;
  int64_t n_heads = 4;
  int64_t n_kv_heads = 2;  // n_heads: every head has its own keys and values
  int64_t ffn_dim = 176;
  int64_t max_seq_len = 64;  // the longest sequence forward() takes: the length of the RoPE tables
  double rope_theta = 10000.0;
  double norm_eps = 1e-5;
  bool tied_embeddings = false;  // the head uses tok.weight, and there is no out.weight

  // "torch": the defaults of torch::nn (Linear: uniform within 1/sqrt(in), Embedding: normal with
  //          deviation 1), the same numbers that PyTorch draws for the same seed, so that loss
  //          curves can be compared.
  // "gpt":   every matrix normal with deviation 0.02, wo and w2 with 0.02 / sqrt(2 * n_layers), so
  //          that the residual stream does not grow with depth. Use it for real training: the first
  //          loss is then about log(vocab_size).
  //          Source: GPT-2 (Radford et al., 2019) section 2.3.
  std::string init = "torch";

  int64_t head_dim() const { return dim / n_heads; }
};

// The config of that name: debug, quickstart, bench, llama2_7b, llama2_13b, llama2_70b, llama3_8b.
//
// Errors: ConfigError for another name, with the nearest one.
LlamaConfig llama_flavor(const std::string& name);
std::vector<std::string> llama_flavor_names();

// Errors: ConfigError when the sizes do not make a model, with the sizes.
void check(const LlamaConfig& config);

// The elements of all parameters; a tied one counts once.
int64_t num_params(const LlamaConfig& config);

}  // namespace tessera::apps

#endif  // APPS_LLAMA_CONFIG_H_
