#include "apps/flops.h"

namespace tessera::apps {

int64_t flops_per_token(const LlamaConfig& config, int64_t seq_len) {
  const int64_t embedding = config.tied_embeddings ? 0 : config.vocab_size * config.dim;
  return 6 * (num_params(config) - embedding) +
         12 * config.n_layers * config.n_heads * config.head_dim() * seq_len;
}

}  // namespace tessera::apps
