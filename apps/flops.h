#ifndef APPS_FLOPS_H_
#define APPS_FLOPS_H_

// The floating point operations of training one token: the numerator of model FLOPs utilisation
// (MFU).
//
//   flops per token = 6 * (N - E) + 12 * L * H * hd * T
//
//   N   parameters;  E  those of the embedding table, which is read and not multiplied
//   L   layers,  H  heads,  hd  elements a head,  T  sequence length
//
//   6   a multiply and an add for every weight, once in forward and twice in backward
//   12  the same for the two products of attention, Q K^T and scores times V, each of hd elements
//       for each of T positions
//
// Where the embeddings are tied, the table is also the head and is multiplied, so E is 0. The mask
// of causal attention is not discounted, and recomputation under activation checkpoints is not
// counted: both as in the sources, so that figures compare.
//
// Source: PaLM (Chowdhery et al., 2022) appendix B; torchtitan.

#include <cstdint>

#include "apps/llama_config.h"

namespace tessera::apps {

// Units:    floating point operations.
// Requires: check(config) passes; seq_len > 0.
int64_t flops_per_token(const LlamaConfig& config, int64_t seq_len);

}  // namespace tessera::apps

#endif  // APPS_FLOPS_H_
