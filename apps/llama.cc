#include "apps/llama.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <cmath>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"

namespace tessera::apps {
namespace {

constexpr int64_t kIgnoredTarget = -100;  // as in torch::nn::functional::cross_entropy
constexpr double kGptDeviation = 0.02;

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

torch::nn::Linear matrix(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

// The rows t of cos and sin hold the angles t / theta^(2i / E). The steps are those of the PyTorch
// code, in fp32, so that the tables are the same to the last bit.
std::pair<at::Tensor, at::Tensor> rope_tables(const LlamaConfig& config) {
  const int64_t head_dim = config.head_dim();
  const at::Tensor exponent = at::arange(0, head_dim, 2).to(at::kFloat).div(head_dim);
  const at::Tensor inverse = at::pow(config.rope_theta, exponent).reciprocal();
  const at::Tensor angle =
      at::outer(at::arange(config.max_seq_len).to(at::kFloat), inverse.to(at::kFloat));
  return {angle.cos(), angle.sin()};
}

// Turns the pairs (x[i], x[i + E / 2]) by their angles: the half-split convention of the published
// weights.
//
// Shapes: x [B, T, H, E]; cos, sin [T, 1, E / 2].
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::vector<at::Tensor> half = x.chunk(2, -1);
  return at::cat(
      {at::addcmul(half[0] * cos, half[1], sin, -1), at::addcmul(half[1] * cos, half[0], sin)}, -1);
}

// On other devices the check would wait for the device; there the kernels themselves assert.
void check_range(const char* what, const at::Tensor& indices, int64_t size) {
  if (!indices.is_cpu() || indices.numel() == 0) return;
  const auto [least, most] = at::aminmax(indices);
  TESSERA_CHECK_CONFIG(least.item<int64_t>() >= 0 && most.item<int64_t>() < size, "expected ", what,
                       " in [0, ", size, "), the vocabulary of the model; found values from ",
                       least.item<int64_t>(), " to ", most.item<int64_t>(),
                       ". Was the data made with another tokenizer?");
}

}  // namespace

RMSNormImpl::RMSNormImpl(int64_t dim, double eps)
    : eps_(eps), weight_(register_parameter("weight", at::ones({dim}))) {}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  return at::rms_norm(x, weight_.sizes(), weight_, eps_);
}

BlockImpl::BlockImpl(const LlamaConfig& config)
    : n_heads_(config.n_heads),
      n_kv_heads_(config.n_kv_heads),
      head_dim_(config.head_dim()),
      attn_norm_(register_module("attn_norm", RMSNorm(config.dim, config.norm_eps))),
      ffn_norm_(register_module("ffn_norm", RMSNorm(config.dim, config.norm_eps))),
      wq_(register_module("wq", matrix(config.dim, n_heads_ * head_dim_))),
      wk_(register_module("wk", matrix(config.dim, n_kv_heads_ * head_dim_))),
      wv_(register_module("wv", matrix(config.dim, n_kv_heads_ * head_dim_))),
      wo_(register_module("wo", matrix(n_heads_ * head_dim_, config.dim))),
      w1_(register_module("w1", matrix(config.dim, config.ffn_dim))),
      w2_(register_module("w2", matrix(config.ffn_dim, config.dim))),
      w3_(register_module("w3", matrix(config.dim, config.ffn_dim))) {}

at::Tensor BlockImpl::forward(at::Tensor x, at::Tensor cos, at::Tensor sin) {
  x = x + attention(attn_norm_(x), cos, sin);
  return x + feed_forward(ffn_norm_(x));
}

at::Tensor BlockImpl::attention(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t batch = x.size(0), time = x.size(1);
  const at::Tensor q_linear =
      wq_(x);  // its dtype is the one that counts: under autocast it is not that of x
  const at::Tensor cos_T1E = cos.to(q_linear.scalar_type()).unsqueeze(1);
  const at::Tensor sin_T1E = sin.to(q_linear.scalar_type()).unsqueeze(1);

  // Positions are turned in the layout [B, T, H, E] in which the projections come and SDPA's
  // backward answers; the transposes below are views, and nothing is copied in either direction.
  const at::Tensor q = rotate(q_linear.view({batch, time, n_heads_, head_dim_}), cos_T1E, sin_T1E);
  const at::Tensor k = rotate(wk_(x).view({batch, time, n_kv_heads_, head_dim_}), cos_T1E, sin_T1E);
  const at::Tensor v = wv_(x).view({batch, time, n_kv_heads_, head_dim_});
  const at::Tensor o = at::scaled_dot_product_attention(
      q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), /*attn_mask=*/{}, /*dropout_p=*/0.0,
      /*is_causal=*/true, /*scale=*/std::nullopt, /*enable_gqa=*/n_heads_ != n_kv_heads_);
  return wo_(o.transpose(1, 2).reshape({batch, time, n_heads_ * head_dim_}));
}

at::Tensor BlockImpl::feed_forward(const at::Tensor& x) { return w2_(at::silu(w1_(x)) * w3_(x)); }

LlamaImpl::LlamaImpl(const LlamaConfig& config) : config_((check(config), config)) {
  // The order of these lines is the order in which start values are drawn, and that of the
  // parameters' names.
  tok_ = register_module("tok", torch::nn::Embedding(config_.vocab_size, config_.dim));
  torch::nn::ModuleList list;
  for (int64_t i = 0; i < config_.n_layers; ++i) {
    layers_.emplace_back(config_);
    list->push_back(layers_.back());
  }
  register_module("layers", list);
  norm_ = register_module("norm", RMSNorm(config_.dim, config_.norm_eps));
  if (!config_.tied_embeddings) {
    out_ = register_module("out", matrix(config_.dim, config_.vocab_size));
  }
  if (config_.init == "gpt") init_gpt();
  std::tie(cos_, sin_) = rope_tables(config_);
}

at::Tensor LlamaImpl::forward(at::Tensor tokens) {
  check_tokens(tokens);
  if (cos_.device() != tokens.device()) {
    cos_ = cos_.to(tokens.device());
    sin_ = sin_.to(tokens.device());
  }
  const int64_t time = tokens.size(1);
  const at::Tensor cos = cos_.narrow(0, 0, time), sin = sin_.narrow(0, 0, time);
  at::Tensor x = tok_(tokens);
  for (Block& layer : layers_) x = layer(x, cos, sin);
  x = norm_(x);
  return config_.tied_embeddings ? at::linear(x, tok_->weight) : out_(x);
}

void LlamaImpl::init_gpt() {
  const double residual = kGptDeviation / std::sqrt(2.0 * static_cast<double>(config_.n_layers));
  for (auto& item : named_parameters()) {
    if (item.value().dim() != 2) continue;  // the norms stay at one
    const bool writes_residual =
        ends_with(item.key(), ".wo.weight") || ends_with(item.key(), ".w2.weight");
    torch::nn::init::normal_(item.value(), 0.0, writes_residual ? residual : kGptDeviation);
  }
}

void LlamaImpl::check_tokens(const at::Tensor& tokens) const {
  TESSERA_CHECK_CONFIG(tokens.defined() && tokens.dim() == 2 && tokens.scalar_type() == at::kLong,
                       "Llama: expected tokens of shape [batch, time] and type int64, found ",
                       tokens.defined() ? base::str(tokens.sizes(), " and ", tokens.scalar_type())
                                        : std::string("an undefined tensor"),
                       ".");
  TESSERA_CHECK_CONFIG(tokens.size(1) <= config_.max_seq_len, "Llama: expected at most ",
                       config_.max_seq_len, " positions (max_seq_len), found tokens of shape ",
                       tokens.sizes(), ". Shorten the sequences or raise max_seq_len.");
  check_range("tokens", tokens, config_.vocab_size);
}

at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets) {
  TESSERA_CHECK_CONFIG(
      logits.dim() == 3 && targets.dim() == 2 && targets.scalar_type() == at::kLong &&
          targets.size(0) == logits.size(0) && targets.size(1) == logits.size(1),
      "loss: expected logits [batch, time, vocab] and int64 targets [batch, time], found ",
      logits.sizes(), " and ", targets.sizes(), " of type ", targets.scalar_type(), ".");
  if (targets.is_cpu()) {
    check_range("targets", targets.masked_select(targets.ne(kIgnoredTarget)), logits.size(2));
  }
  return at::cross_entropy_loss(logits.to(at::kFloat).flatten(0, 1), targets.flatten());
}

}  // namespace tessera::apps
