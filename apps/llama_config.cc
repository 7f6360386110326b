#include "apps/llama_config.h"

#include <utility>

#include "base/error.h"
#include "base/nearest.h"

namespace tessera::apps {
namespace {

LlamaConfig make(int64_t vocab_size, int64_t dim, int64_t n_layers, int64_t n_heads,
                 int64_t n_kv_heads, int64_t ffn_dim, int64_t max_seq_len,
                 double rope_theta = 10000.0) {
  LlamaConfig config;
  config.vocab_size = vocab_size;
  config.dim = dim;
  config.n_layers = n_layers;
  config.n_heads = n_heads;
  config.n_kv_heads = n_kv_heads;
  config.ffn_dim = ffn_dim;
  config.max_seq_len = max_seq_len;
  config.rope_theta = rope_theta;
  return config;
}

const std::vector<std::pair<std::string, LlamaConfig>>& flavors() {
  static const auto* const kFlavors = new std::vector<std::pair<std::string, LlamaConfig>>{
      {"debug", make(256, 64, 2, 4, 2, 176, 64)},         // milliseconds a step
      {"quickstart", make(256, 128, 4, 4, 4, 344, 128)},  // bytes; learns in minutes on a CPU
      {"bench", make(8192, 512, 8, 8, 8, 1376, 128)},     // the defaults of benchmarks/step
      {"llama2_7b", make(32000, 4096, 32, 32, 32, 11008, 4096)},
      {"llama2_13b", make(32000, 5120, 40, 40, 40, 13824, 4096)},
      {"llama2_70b", make(32000, 8192, 80, 64, 8, 28672, 4096)},
      {"llama3_8b", make(128256, 4096, 32, 32, 8, 14336, 8192, 500000.0)},
  };
  return *kFlavors;
}

}  // namespace

LlamaConfig llama_flavor(const std::string& name) {
  for (const auto& [known, config] : flavors()) {
    if (known == name) return config;
  }
  const std::string near = base::nearest(name, llama_flavor_names());
  std::string all;
  for (const std::string& known : llama_flavor_names()) all += (all.empty() ? "" : ", ") + known;
  throw ConfigError(base::str("expected a Llama flavor, one of ", all, "; found '", name, "'.",
                              near.empty() ? "" : base::str(" Did you mean '", near, "'?")));
}

std::vector<std::string> llama_flavor_names() {
  std::vector<std::string> names;
  for (const auto& flavor : flavors()) names.push_back(flavor.first);
  return names;
}

void check(const LlamaConfig& config) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"vocab_size", config.vocab_size},   {"dim", config.dim},
      {"n_layers", config.n_layers},       {"n_heads", config.n_heads},
      {"n_kv_heads", config.n_kv_heads},   {"ffn_dim", config.ffn_dim},
      {"max_seq_len", config.max_seq_len},
  };
  for (const auto& [name, size] : sizes) {
    // The upper bound keeps products of sizes in 64 bits.
    constexpr int64_t kMaxSize = 1 << 20;
    TESSERA_CHECK_CONFIG(size > 0 && size <= kMaxSize, "Llama config: expected ", name,
                         " from 1 to ", kMaxSize, ", found ", size, ".");
  }
  TESSERA_CHECK_CONFIG(config.dim % config.n_heads == 0,
                       "Llama config: expected n_heads to divide dim, found dim ", config.dim,
                       " and n_heads ", config.n_heads, ".");
  TESSERA_CHECK_CONFIG(config.head_dim() % 2 == 0,
                       "Llama config: expected an even dim / n_heads (RoPE turns pairs), found ",
                       config.dim, " / ", config.n_heads, " = ", config.head_dim(), ".");
  TESSERA_CHECK_CONFIG(config.n_heads % config.n_kv_heads == 0,
                       "Llama config: expected n_kv_heads to divide n_heads, found n_heads ",
                       config.n_heads, " and n_kv_heads ", config.n_kv_heads, ".");
  TESSERA_CHECK_CONFIG(config.rope_theta > 0, "Llama config: expected rope_theta > 0, found ",
                       config.rope_theta, ".");
  TESSERA_CHECK_CONFIG(config.norm_eps >= 0, "Llama config: expected norm_eps >= 0, found ",
                       config.norm_eps, ".");
  TESSERA_CHECK_CONFIG(config.init == "torch" || config.init == "gpt",
                       "Llama config: expected init 'torch' or 'gpt', found '", config.init, "'.");
}

int64_t num_params(const LlamaConfig& config) {
  const int64_t q = config.dim * config.dim;
  const int64_t kv = config.dim * config.n_kv_heads * config.head_dim();
  const int64_t block = 2 * config.dim + 2 * q + 2 * kv + 3 * config.dim * config.ffn_dim;
  const int64_t embedding = config.vocab_size * config.dim;
  return embedding * (config.tied_embeddings ? 1 : 2) + config.n_layers * block + config.dim;
}

}  // namespace tessera::apps
