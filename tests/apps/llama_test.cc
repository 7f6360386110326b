// Goal: the Llama computes what PyTorch's does, names its parameters alike, and refuses what it
// cannot do; sampling repeats itself; FLOPs are those of a count by hand. Method: losses and
// gradients of a tiny model from llama_reference.bin (written by llama_reference.py in fp64).

#include "apps/llama.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "apps/flops.h"
#include "apps/sampling.h"
#include "base/error.h"
#include "tests/harness/tensor_file.h"

namespace tessera::apps {
namespace {

using ::testing::HasSubstr;

// The error of our fp32 against the exact value, relative to the largest element of the same
// tensor. One dot product of n terms in fp32 is off by about sqrt(n) roundings of 2^-24 (random
// signs; n times that at worst). The longest chain is a gradient of the first layer: about 7
// products forward and 14 back in each of 2 layers and the head, with n <= 88: sqrt(2 * 21 + 3) *
// sqrt(88) * 2^-24 = 3.8e-6 where roundings are independent. Measured: 1.1e-6 (see the test's
// output property). An eps of 1e-6 for 1e-5, about the smallest mistake one can make, is off by
// 5e-4 (measured).
constexpr double kBound = 4e-6;

LlamaConfig reference_config() {
  LlamaConfig config;
  config.vocab_size = 67;
  config.dim = 32;
  config.n_layers = 2;
  config.n_heads = 4;
  config.n_kv_heads = 2;
  config.ffn_dim = 88;
  config.max_seq_len = 16;
  return config;
}

const std::map<std::string, at::Tensor>& reference() {
  static const auto* const kReference = new std::map<std::string, at::Tensor>(
      harness::read_tensor_file("tests/apps/llama_reference.bin"));
  return *kReference;
}

Llama reference_model(const LlamaConfig& config) {
  Llama model(config);
  const at::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) {
    const at::Tensor& value = reference().at("param." + item.key());
    EXPECT_EQ(item.value().sizes(), value.sizes()) << item.key();
    item.value().copy_(value);
  }
  return model;
}

double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  return (found.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>() /
         expected.abs().max().item<double>();
}

std::string config_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no ConfigError was thrown";
}

// Compares the loss and all gradients, and that the reference names no parameter that the model has
// not.
void expect_like_reference(Llama model, const std::string& prefix) {
  const at::Tensor found = loss(model(reference().at("tokens")), reference().at("targets"));
  found.backward();
  double worst = relative_error(found.detach(), reference().at(prefix + "loss"));
  EXPECT_LE(worst, kBound) << "loss";

  size_t num_grads = 0;
  for (const auto& [name, tensor] : reference()) num_grads += name.rfind(prefix + "grad.", 0) == 0;
  EXPECT_EQ(model->named_parameters().size(), num_grads);
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    const double error =
        relative_error(item.value().grad(), reference().at(prefix + "grad." + item.key()));
    EXPECT_LE(error, kBound) << item.key();
    worst = std::max(worst, error);
  }
  ::testing::Test::RecordProperty("worst_relative_error", base::str(worst));
}

TEST(Llama, LossAndEveryGradientAreThoseOfPyTorch) {
  expect_like_reference(reference_model(reference_config()), "");
}

TEST(Llama, TiedHeadGivesTheGradientsOfPyTorch) {
  LlamaConfig config = reference_config();
  config.tied_embeddings = true;
  config.n_layers = 1;
  expect_like_reference(reference_model(config), "tied_");
}

TEST(Llama, NamesItsParametersAsPyTorchCodeDoesAndInThatOrder) {
  std::vector<std::string> expected = {"tok.weight"};
  for (const std::string layer : {"layers.0.", "layers.1."}) {
    for (const std::string part :
         {"attn_norm", "ffn_norm", "wq", "wk", "wv", "wo", "w1", "w2", "w3"}) {
      expected.push_back(layer + part + ".weight");
    }
  }
  expected.insert(expected.end(), {"norm.weight", "out.weight"});
  EXPECT_EQ(Llama(reference_config())->named_parameters().keys(), expected);

  LlamaConfig tied = reference_config();
  tied.tied_embeddings = true;
  expected.pop_back();
  EXPECT_EQ(Llama(tied)->named_parameters().keys(), expected);
  EXPECT_TRUE(Llama(tied)->named_buffers().is_empty());
}

TEST(Llama, CountsItsParametersWithoutBeingBuilt) {
  for (const std::string name : {"debug", "quickstart"}) {
    for (const bool tied : {false, true}) {
      LlamaConfig config = llama_flavor(name);
      config.tied_embeddings = tied;
      int64_t numel = 0;
      for (const at::Tensor& param : Llama(config)->parameters()) numel += param.numel();
      EXPECT_EQ(num_params(config), numel) << name << (tied ? " tied" : "");
    }
  }
  // The published sizes: 6.74, 13.02, 68.98 and 8.03 thousand million.
  EXPECT_EQ(num_params(llama_flavor("llama2_7b")), 6738415616);
  EXPECT_EQ(num_params(llama_flavor("llama2_13b")), 13015864320);
  EXPECT_EQ(num_params(llama_flavor("llama2_70b")), 68976648192);
  EXPECT_EQ(num_params(llama_flavor("llama3_8b")), 8030261248);
}

TEST(Llama, APositionSeesNothingAfterIt) {
  Llama model = reference_model(reference_config());
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = reference().at("tokens");
  at::Tensor changed = tokens.clone();
  changed.narrow(1, 9, 7).fill_(3);
  const at::Tensor a = model(tokens), b = model(changed);
  EXPECT_TRUE(at::equal(a.narrow(1, 0, 9), b.narrow(1, 0, 9)));
  EXPECT_FALSE(at::equal(a.narrow(1, 9, 7), b.narrow(1, 9, 7)));
}

TEST(Llama, ComputesInTheDtypeOfItsParameters) {
  Llama model = reference_model(reference_config());
  model->to(at::kBFloat16);
  const at::Tensor logits = model(reference().at("tokens"));
  EXPECT_EQ(logits.scalar_type(), at::kBFloat16);
  const at::Tensor found = loss(logits, reference().at("targets"));
  EXPECT_EQ(found.scalar_type(), at::kFloat);
  // bf16 keeps 8 bits, and the loss is a mean of 32 logarithms of which each is off by a few of
  // those.
  EXPECT_NEAR(found.item<double>(), reference().at("loss").item<double>(), 0.05);
}

TEST(Llama, DrawsTheStartValuesOfTheSeed) {
  const auto build = [](const std::string& init) {
    torch::manual_seed(5);
    LlamaConfig config = llama_flavor("debug");
    config.init = init;
    return Llama(config);
  };
  EXPECT_TRUE(at::equal(build("torch")->parameters().back(), build("torch")->parameters().back()));

  // 1 / sqrt(64) bounds the uniform of torch::nn::Linear; its 256 * 64 draws come near it.
  const double most = build("torch")->named_parameters()["out.weight"].abs().max().item<double>();
  EXPECT_LE(most, 0.125);
  EXPECT_GT(most, 0.12);

  // The deviation of n normal draws is known to 1 / sqrt(2 n); n >= 8192, and 5 of those are 4%.
  Llama gpt = build("gpt");
  const auto params = gpt->named_parameters();
  const auto deviation = [&](const std::string& name) { return params[name].std().item<double>(); };
  for (const std::string name : {"tok.weight", "out.weight", "layers.1.w1.weight"}) {
    EXPECT_NEAR(deviation(name) / 0.02, 1.0, 0.04) << name;
  }
  EXPECT_NEAR(deviation("layers.1.w2.weight") / (0.02 / std::sqrt(4.0)), 1.0, 0.04);
  EXPECT_EQ(params["layers.0.ffn_norm.weight"].sum().item<double>(), 64);
}

TEST(Llama, RefusesTokensAndTargetsItCannotUse) {
  Llama model(reference_config());
  EXPECT_THAT(config_error([&] { model(at::zeros({16}, at::kLong)); }), HasSubstr("found [16]"));
  EXPECT_THAT(config_error([&] { model(at::zeros({1, 16}, at::kFloat)); }), HasSubstr("Float"));
  EXPECT_THAT(config_error([&] { model(at::Tensor()); }), HasSubstr("undefined"));
  EXPECT_THAT(config_error([&] {
                model(at::zeros({1, 17}, at::kLong));
              }),
              HasSubstr("at most 16 positions (max_seq_len), found tokens of shape [1, 17]"));
  EXPECT_THAT(config_error([&] {
                model(at::full({1, 4}, 67, at::kLong));
              }),
              HasSubstr("[0, 67), the vocabulary of the model; found values from 67 to 67"));
  EXPECT_THAT(config_error([&] { model(at::full({1, 4}, -1, at::kLong)); }), HasSubstr("-1 to -1"));

  const at::Tensor logits = at::zeros({2, 3, 67});
  EXPECT_THAT(config_error([&] {
                loss(logits, at::zeros({2, 4}, at::kLong));
              }),
              HasSubstr("found [2, 3, 67] and [2, 4]"));
  EXPECT_THAT(config_error([&] {
                loss(logits, at::full({2, 3}, 67, at::kLong));
              }),
              HasSubstr("targets in [0, 67)"));
}

TEST(Llama, LeavesIgnoredTargetsOutOfTheLoss) {
  const at::Tensor logits = at::zeros({1, 2, 4});
  logits[0][0][1] = 5.0;  // a wrong answer at a position that does not count
  const at::Tensor targets = at::tensor({-100, 2}, at::kLong).view({1, 2});
  EXPECT_NEAR(loss(logits, targets).item<double>(), std::log(4.0), 1e-6);
}

TEST(LlamaConfig, RefusesSizesThatMakeNoModel) {
  const auto error_of = [](const std::function<void(LlamaConfig&)>& change) {
    LlamaConfig config;
    change(config);
    return config_error([&] { check(config); });
  };
  EXPECT_THAT(error_of([](LlamaConfig& c) { c.dim = 66; }), HasSubstr("dim 66 and n_heads 4"));
  EXPECT_THAT(error_of([](LlamaConfig& c) { c.dim = 12; }), HasSubstr("12 / 4 = 3"));
  EXPECT_THAT(error_of([](LlamaConfig& c) { c.n_kv_heads = 3; }), HasSubstr("n_kv_heads 3"));
  EXPECT_THAT(error_of([](LlamaConfig& c) { c.n_layers = 0; }),
              HasSubstr("n_layers from 1 to 1048576, found 0."));
  EXPECT_THAT(error_of([](LlamaConfig& c) { c.vocab_size = 1000000000; }),
              HasSubstr("vocab_size from 1 to 1048576, found 1000000000."));
  EXPECT_THAT(error_of([](LlamaConfig& c) { c.init = "xavier"; }), HasSubstr("'xavier'"));
  EXPECT_THAT(config_error([] { llama_flavor("lama2_7b"); }), HasSubstr("mean 'llama2_7b'"));
  for (const std::string& name : llama_flavor_names()) EXPECT_NO_THROW(check(llama_flavor(name)));
}

TEST(Flops, AreThoseOfACountByHand) {
  // A block: norms 2 * 64, wq and wo 64 * 64 each, wk and wv 64 * 32 each, w1, w2, w3 64 * 176
  // each: 46,208. Two blocks, the last norm 64 and the head 256 * 64: 108,864. Attention at T = 10:
  // 12 * 2 * 4 * 16 * 10 = 15,360.
  LlamaConfig config = llama_flavor("debug");
  EXPECT_EQ(flops_per_token(config, 10), 6 * 108864 + 15360);
  config.tied_embeddings = true;  // the same products are computed
  EXPECT_EQ(flops_per_token(config, 10), 6 * 108864 + 15360);
}

TEST(Sampling, RepeatsItselfForASeedAndLeavesTheDefaultGeneratorAlone) {
  torch::manual_seed(1);
  Llama model(llama_flavor("debug"));
  torch::manual_seed(2);
  const at::Tensor untouched = at::rand({4});
  torch::manual_seed(2);
  SampleOptions options;
  options.num_bytes = 80;  // past max_seq_len (64): the window slides
  options.seed = 7;
  const std::string text = sample(model, "ab", options);
  EXPECT_TRUE(at::equal(at::rand({4}), untouched));
  EXPECT_EQ(text.size(), 80u);
  EXPECT_EQ(sample(model, "ab", options), text);
  options.seed = 8;
  EXPECT_NE(sample(model, "ab", options), text);
  for (const at::Tensor& param : model->parameters()) EXPECT_FALSE(param.grad().defined());
}

TEST(Sampling, DrawsTheLikeliestByteAtTemperatureZeroAndForTopOne) {
  torch::manual_seed(1);
  Llama model(llama_flavor("debug"));
  SampleOptions greedy;
  greedy.num_bytes = 20;
  greedy.temperature = 0;
  SampleOptions top_one;
  top_one.num_bytes = 20;
  top_one.top_k = 1;
  top_one.seed = 3;
  const std::string text = sample(model, "xyz", greedy);
  EXPECT_EQ(sample(model, "xyz", top_one), text);

  const at::NoGradGuard no_grad;
  std::vector<int64_t> tokens = {'x', 'y', 'z'};
  for (const char c : text) {
    const at::Tensor logits = model(at::tensor(tokens, at::kLong).view({1, -1}))[0][-1];
    EXPECT_EQ(logits.argmax().item<int64_t>(), static_cast<unsigned char>(c));
    tokens.push_back(static_cast<unsigned char>(c));
  }
}

TEST(Sampling, DrawsOnlyBytesOfALargerVocabulary) {
  torch::manual_seed(1);
  LlamaConfig config = llama_flavor("debug");
  config.vocab_size = 300;
  Llama model(config);
  const at::NoGradGuard no_grad;
  model->named_parameters()["out.weight"].narrow(0, 0, 256).mul_(0.01);  // the other 44 win
  SampleOptions greedy;
  greedy.num_bytes = 10;
  greedy.temperature = 0;
  std::vector<int64_t> tokens = {'a'};
  for (const char c : sample(model, "a", greedy)) {
    const at::Tensor logits = model(at::tensor(tokens, at::kLong).view({1, -1}))[0][-1];
    ASSERT_GE(logits.argmax().item<int64_t>(), 256);
    EXPECT_EQ(logits.narrow(0, 0, 256).argmax().item<int64_t>(), static_cast<unsigned char>(c));
    tokens.push_back(static_cast<unsigned char>(c));
  }
  EXPECT_EQ(tokens.size(), 11u);
}

TEST(Sampling, RefusesWhatItCannotDo) {
  Llama model(llama_flavor("debug"));
  SampleOptions options;
  EXPECT_THAT(config_error([&] { sample(model, "", options); }), HasSubstr("empty"));
  EXPECT_THAT(config_error([&] { sample(Llama(reference_config()), "a", options); }),
              HasSubstr("vocab_size 67"));
  options.temperature = -1;
  EXPECT_THAT(config_error([&] { sample(model, "a", options); }),
              HasSubstr("temperature >= 0, found -1"));
  options.temperature = 1;
  options.top_k = -2;
  EXPECT_THAT(config_error([&] { sample(model, "a", options); }),
              HasSubstr("top_k >= 0, found -2"));
}

TEST(Sampling, EscapesWhatATerminalDoesNotShow) {
  EXPECT_EQ(escape("a b~\n\t\r\\"), "a b~\\n\\t\\r\\\\");
  EXPECT_EQ(escape(std::string("\0\x1b\x7f\xff", 4)), "\\x00\\x1b\\x7f\\xff");
}

}  // namespace
}  // namespace tessera::apps
