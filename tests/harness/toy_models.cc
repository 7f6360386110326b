#include "tests/harness/toy_models.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/utils.h>

#include <mutex>
#include <set>
#include <stdexcept>

#include "apps/llama.h"
#include "engine/module_hook.h"

namespace tessera::harness {

// Named, not anonymous: warnings and errors name the types of units.

// fc2(tanh(fc1(x))) + skip(x)
class MlpBlockImpl : public torch::nn::Module {
 public:
  MlpBlockImpl(int64_t in, int64_t hidden, int64_t out)
      : fc1_(register_module("fc1", torch::nn::Linear(in, hidden))),
        fc2_(register_module("fc2", torch::nn::Linear(hidden, out))),
        skip_(register_module("skip",
                              torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)))) {}

  at::Tensor forward(at::Tensor x) {
    return fc2_->forward(at::tanh(fc1_->forward(x))) + skip_->forward(x);
  }

 private:
  torch::nn::Linear fc1_, fc2_, skip_;
};
TESSERA_MODULE(MlpBlock);

class MlpImpl : public torch::nn::Module {
 public:
  MlpImpl()
      : block1_(register_module("block1", MlpBlock(7, 11, 13))),
        block2_(register_module("block2", MlpBlock(13, 9, 5))),
        block3_(register_module("block3", MlpBlock(5, 7, 3))),
        scale_(register_parameter("scale", at::randn({3}))) {}

  at::Tensor forward(at::Tensor x) { return block3_(block2_(block1_(x))) * scale_; }

 private:
  MlpBlock block1_, block2_, block3_;
  at::Tensor scale_;
};
TESSERA_MODULE(Mlp);

class TiedImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kVocab = 11;
  static constexpr int64_t kWidth = 6;

  TiedImpl()
      : embed_(register_module("embed", torch::nn::Embedding(kVocab, kWidth))),
        block1_(register_module("block1", MlpBlock(kWidth, 9, kWidth))),
        block2_(register_module("block2", MlpBlock(kWidth, 5, kWidth))),
        head_bias_(register_parameter("head_bias", at::zeros({kVocab}))),
        head_weight_(register_parameter("head_weight", embed_->weight)) {}

  at::Tensor forward(at::Tensor tokens) {
    return at::linear(block2_(block1_(embed_->forward(tokens))), head_weight_, head_bias_);
  }

 private:
  torch::nn::Embedding embed_;
  MlpBlock block1_, block2_;
  at::Tensor head_bias_, head_weight_;
};
TESSERA_MODULE(Tied);

// A unit with a frozen, an unused and an optional layer.
class PartialBlockImpl : public torch::nn::Module {
 public:
  explicit PartialBlockImpl(int64_t width)
      : trained_(register_module("trained", torch::nn::Linear(width, width))),
        frozen_(register_module("frozen", torch::nn::Linear(width, width))),
        unused_(register_module("unused", torch::nn::Linear(width, 3))),
        optional_(register_module("optional", torch::nn::Linear(width, width))) {
    for (at::Tensor& parameter : frozen_->parameters()) parameter.set_requires_grad(false);
  }

  at::Tensor forward(at::Tensor x, at::Tensor flag) {
    at::Tensor y = x + frozen_->forward(at::tanh(trained_->forward(x)));
    if (flag.item<int64_t>() != 0) y = y + optional_->forward(x);
    return y;
  }

 private:
  torch::nn::Linear trained_, frozen_, unused_, optional_;
};
TESSERA_MODULE(PartialBlock);

class PartialImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kWidth = 5;

  PartialImpl()
      : block1_(register_module("block1", PartialBlock(kWidth))),
        block2_(register_module("block2", PartialBlock(kWidth))),
        scale_(register_parameter("scale", at::randn({kWidth}))),
        unused_(register_parameter("unused", at::randn({3, 3}))),
        optional_(register_parameter("optional", at::randn({kWidth}))) {}

  at::Tensor forward(at::Tensor x, at::Tensor flag) {
    const at::Tensor y = block2_(block1_(x, flag), flag) * scale_;
    return flag.item<int64_t>() != 0 ? y + optional_ : y;
  }

 private:
  PartialBlock block1_, block2_;
  at::Tensor scale_, unused_, optional_;
};
TESSERA_MODULE(Partial);

namespace {

constexpr int64_t kRows = 3;

// Apart for all (step, micro-batch, rank) that tests use.
at::Generator generator_of(int64_t step, int64_t micro_batch, int64_t rank) {
  return at::detail::createCPUGenerator(1'000'003 * (step + 1) + 1009 * micro_batch + rank);
}

template <typename Root, typename Unit>
class ToyModelOf : public ToyModel {
 public:
  explicit ToyModelOf(Root root) : root_(std::move(root)) {}

  std::shared_ptr<torch::nn::Module> root() override { return root_.ptr(); }

  bool is_unit(const torch::nn::Module& module) const override {
    return dynamic_cast<const typename Unit::ContainedType*>(&module) != nullptr;
  }

 protected:
  Root root_;
};

at::Tensor square_loss(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output.to(at::kFloat), target);
}

class MlpModel : public ToyModelOf<Mlp, MlpBlock> {
 public:
  using ToyModelOf::ToyModelOf;

  at::Tensor loss(const Batch& batch) override {
    return square_loss(root_(batch.input), batch.target);
  }

  Batch batch(int64_t step, int64_t micro_batch, int64_t rank) const override {
    at::Generator generator = generator_of(step, micro_batch, rank);
    return {at::randn({kRows, 7}, generator), at::randn({kRows, 3}, generator), {}};
  }
};

class TiedModel : public ToyModelOf<Tied, MlpBlock> {
 public:
  using ToyModelOf::ToyModelOf;

  at::Tensor loss(const Batch& batch) override {
    return at::cross_entropy_loss(root_(batch.input).to(at::kFloat), batch.target);
  }

  Batch batch(int64_t step, int64_t micro_batch, int64_t rank) const override {
    at::Generator generator = generator_of(step, micro_batch, rank);
    return {at::randint(0, TiedImpl::kVocab, {kRows}, generator, at::kLong),
            at::randint(0, TiedImpl::kVocab, {kRows}, generator, at::kLong),
            {}};
  }
};

class PartialModel : public ToyModelOf<Partial, PartialBlock> {
 public:
  using ToyModelOf::ToyModelOf;

  at::Tensor loss(const Batch& batch) override {
    return square_loss(root_(batch.input, batch.flag), batch.target);
  }

  Batch batch(int64_t step, int64_t micro_batch, int64_t rank) const override {
    at::Generator generator = generator_of(step, micro_batch, rank);
    // In one of three: with few ranks and micro-batches there are steps where nobody's flag is set,
    // and in step 0 of one rank with one micro-batch it is not.
    const int64_t flag = (step + micro_batch + rank) % 3 == 1 ? 1 : 0;
    return {at::randn({kRows, PartialImpl::kWidth}, generator),
            at::randn({kRows, PartialImpl::kWidth}, generator), at::full({1}, flag, at::kLong)};
  }
};

constexpr int64_t kLlamaVocab = 17;
constexpr int64_t kLlamaPositions = 5;

apps::LlamaConfig llama_config() {
  apps::LlamaConfig config;
  config.vocab_size = kLlamaVocab;
  config.dim = 12;
  config.n_layers = 2;
  config.n_heads = 2;
  config.n_kv_heads = 1;
  config.ffn_dim = 19;
  config.max_seq_len = 8;
  return config;
}

class LlamaModel : public ToyModelOf<apps::Llama, apps::Block> {
 public:
  using ToyModelOf::ToyModelOf;

  at::Tensor loss(const Batch& batch) override {
    return apps::loss(root_(batch.input), batch.target);
  }

  Batch batch(int64_t step, int64_t micro_batch, int64_t rank) const override {
    at::Generator generator = generator_of(step, micro_batch, rank);
    const std::vector<int64_t> shape = {kRows, kLlamaPositions};
    return {at::randint(0, kLlamaVocab, shape, generator, at::kLong),
            at::randint(0, kLlamaVocab, shape, generator, at::kLong),
            {}};
  }
};

// torch::manual_seed() sets a generator that all threads share.
std::mutex generator_mutex;

// Makes a model whose start values the seed fixes.
template <typename Make>
std::unique_ptr<ToyModel> seeded(uint64_t seed, Make make) {
  const std::lock_guard<std::mutex> lock(generator_mutex);
  torch::manual_seed(seed);
  return make();
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> ToyModel::parameters() {
  std::vector<std::pair<std::string, at::Tensor>> result;
  std::set<const void*> seen;
  for (const auto& parameter : root()->named_parameters()) {
    if (seen.insert(parameter.value().unsafeGetTensorImpl()).second) {
      result.emplace_back(parameter.key(), parameter.value());
    }
  }
  return result;
}

const std::vector<ModelCase>& model_cases() {
  static const std::vector<ModelCase> cases = {
      {"mlp",
       [](uint64_t seed) {
         return seeded(seed, [] { return std::make_unique<MlpModel>(Mlp()); });
       }},
      {"tied",
       [](uint64_t seed) {
         return seeded(seed, [] { return std::make_unique<TiedModel>(Tied()); });
       }},
      {"partial",
       [](uint64_t seed) {
         return seeded(seed, [] { return std::make_unique<PartialModel>(Partial()); });
       }},
      {"llama",
       [](uint64_t seed) {
         return seeded(seed,
                       [] { return std::make_unique<LlamaModel>(apps::Llama(llama_config())); });
       }},
  };
  return cases;
}

const ModelCase& model_case(const std::string& name) {
  for (const ModelCase& candidate : model_cases()) {
    if (candidate.name == name) return candidate;
  }
  throw std::out_of_range("no toy model is named '" + name + "'");
}

}  // namespace tessera::harness
