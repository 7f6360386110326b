#ifndef APPS_LLAMA_H_
#define APPS_LLAMA_H_

// Llama: a decoder of pre-normalised blocks with RMSNorm, rotary positions, grouped-query attention
// and SwiGLU.
//
//   tokens [B, T] -> tok -> layers.0 ... layers.(L-1) -> norm -> out -> logits [B, T, V]
//
// Block and Llama are declared with TESSERA_MODULE: they are the sharding units (units_of<Block>(),
// and the root). Everything else is plain torch::nn. Parameters are named as in the usual PyTorch
// code: tok.weight, layers.N.{attn_norm,ffn_norm,wq,wk,wv,wo,w1,w2,w3}.weight, norm.weight,
// out.weight.
//
// The code holds no cast of its own: under a bf16 policy the parameters and the inputs of every
// unit come in bf16.
//
// Shapes: B sequences, T positions, D dim, H heads, K heads of keys and values, E elements a head,
//         F ffn_dim, V vocab.
// Source: LLaMA (Touvron et al., 2023); RoFormer (Su et al., 2021); GQA (Ainslie et al., 2023).

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <vector>

#include "apps/llama_config.h"
#include "engine/module_hook.h"

namespace tessera::apps {

// x / sqrt(mean(x^2) + eps) * weight, over the last dimension.
class RMSNormImpl : public torch::nn::Module {
 public:
  RMSNormImpl(int64_t dim, double eps);
  at::Tensor forward(const at::Tensor& x);

 private:
  double eps_;
  at::Tensor weight_;
};
TORCH_MODULE(RMSNorm);

// x + attention(norm(x)), then x + swiglu(norm(x)).
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const LlamaConfig& config);

  // Shapes: x [B, T, D]; cos and sin [T, E / 2], of any dtype; returns [B, T, D].
  at::Tensor forward(at::Tensor x, at::Tensor cos, at::Tensor sin);

 private:
  at::Tensor attention(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
  at::Tensor feed_forward(const at::Tensor& x);

  int64_t n_heads_, n_kv_heads_, head_dim_;
  RMSNorm attn_norm_, ffn_norm_;
  torch::nn::Linear wq_, wk_, wv_, wo_;
  torch::nn::Linear w1_, w2_, w3_;
};
TESSERA_MODULE(Block);

class LlamaImpl : public torch::nn::Module {
 public:
  // Draws the start values from the default generator: call torch::manual_seed() before, the same
  // on all ranks.
  //
  // Errors: ConfigError from check(config).
  explicit LlamaImpl(const LlamaConfig& config);

  // Shapes: tokens [B, T], int64; returns [B, T, V] in the dtype of the parameters.
  // Errors: ConfigError for another shape or dtype, for T > max_seq_len, and on CPU for a token
  //         outside [0, V).
  at::Tensor forward(at::Tensor tokens);

  const LlamaConfig& config() const { return config_; }

 private:
  void init_gpt();
  void check_tokens(const at::Tensor& tokens) const;

  LlamaConfig config_;
  torch::nn::Embedding tok_{nullptr};
  std::vector<Block> layers_;  // holders: a call through them passes the hooks
  RMSNorm norm_{nullptr};
  torch::nn::Linear out_{nullptr};  // empty when the embeddings are tied

  // The RoPE tables [max_seq_len, E / 2]. Not buffers: LibTorch saves every buffer, and these
  // follow from the config. They move to the device of the tokens at the first forward.
  at::Tensor cos_, sin_;
};
TESSERA_MODULE(Llama);

// The mean cross entropy of the targets, computed in fp32. Targets of -100 are left out of the
// mean.
//
// Shapes: logits [B, T, V]; targets [B, T], int64; returns a scalar.
// Errors: ConfigError for other shapes, and on CPU for a target outside [0, V).
at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace tessera::apps

#endif  // APPS_LLAMA_H_
