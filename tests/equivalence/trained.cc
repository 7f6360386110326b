#include "tests/equivalence/trained.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>

#include "optim/adamw.h"
#include "optim/sgd.h"
#include "tests/harness/ranks.h"

namespace tessera::equivalence {
namespace {

using harness::Alone;
using harness::AloneOptions;
using harness::NamedTensors;
using harness::SumOrder;
using harness::ToyModel;
using harness::Update;

// What one rank has of one parameter at one time.
struct Slice {
  OwnedParam owner;
  at::Tensor tensor;  // undefined, or owner.elements().size() long
};

// What one rank saw.
struct RankRecord {
  std::vector<std::vector<Slice>> grads;  // by step
  std::vector<double> norms;              // by step
  std::vector<Slice> values;
};

AloneOptions options_of(const Case& c) {
  AloneOptions options;
  options.ranks = c.ranks;
  options.micro_batches = c.micro_batches;
  options.order =
      c.strategy == Strategy::kReplicate ? SumOrder::kMicroBatchFirst : SumOrder::kRankFirst;
  options.bf16 = c.bf16;
  options.max_norm = c.clip ? kMaxNorm : 0.0;
  options.update = c.update;
  return options;
}

Policy policy_of(const Case& c, const ToyModel& model) {
  Policy policy;
  policy.strategy = c.strategy;
  policy.precision = c.bf16 ? precision::bf16() : precision::fp32();
  policy.units = [&model](const torch::nn::Module& module) { return model.is_unit(module); };
  // A few parameters a bucket: the toy models must not fit into one.
  policy.bucket_bytes = 512;
  policy.first_bucket_bytes = 256;
  return policy;
}

// The optimizer of the case, with the options that Alone has.
class Optimizer {
 public:
  Optimizer(const std::vector<OwnedParam>& params, const AloneOptions& options) {
    if (options.update == Update::kSgd) {
      optim::SGDOptions sgd;
      sgd.lr = options.lr;
      sgd.momentum = options.momentum;
      sgd.weight_decay = options.weight_decay;
      sgd_ = std::make_unique<optim::SGD>(params, sgd);
      return;
    }
    optim::AdamWOptions adamw;
    adamw.lr = options.lr;
    adamw.weight_decay = options.weight_decay;
    adamw_ = std::make_unique<optim::AdamW>(params, adamw);
  }

  void step_and_clear() {
    if (sgd_) {
      sgd_->step();
      sgd_->zero_grad();
    } else {
      adamw_->step();
      adamw_->zero_grad();
    }
  }

 private:
  std::unique_ptr<optim::SGD> sgd_;
  std::unique_ptr<optim::AdamW> adamw_;
};

at::Tensor copy_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().clone() : tensor;
}

RankRecord train_rank(const Case& c, comm::World& world, int64_t steps) {
  const std::unique_ptr<ToyModel> model = harness::model_case(c.model).make(kSeed);
  auto parallel = parallelize(model->root(), world, policy_of(c, *model));
  const std::vector<OwnedParam> owned = parallel.owned_params();
  Optimizer optimizer(owned, options_of(c));
  RankRecord record;
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t micro_batch = 0; micro_batch < c.micro_batches; ++micro_batch) {
      auto sync = parallel.sync_gradients(micro_batch + 1 == c.micro_batches);
      const at::Tensor loss = model->loss(model->batch(step, micro_batch, world.rank()));
      (loss / c.micro_batches).backward();
    }
    record.norms.push_back(c.clip ? parallel.clip_grad_norm(kMaxNorm) : 0.0);
    record.grads.emplace_back();
    for (const OwnedParam& param : owned) {
      record.grads.back().push_back({param, copy_of(param.grad())});
    }
    optimizer.step_and_clear();
  }
  for (const OwnedParam& param : owned) {
    record.values.push_back({param, copy_of(param.value())});
  }
  return record;
}

// One parameter put together from the slices that all ranks have of it; undefined when all are.
at::Tensor whole_of(const std::vector<Slice>& slices) {
  const OwnedParam& first = slices[0].owner;
  int64_t numel = 1;
  for (const int64_t size : first.shape()) numel *= size;
  at::Tensor whole = at::empty({numel});
  at::Tensor owners = at::zeros({numel}, at::kInt);
  at::Tensor primary_owners = at::zeros({numel}, at::kInt);
  int64_t defined = 0;
  int64_t not_empty = 0;
  for (const Slice& slice : slices) {
    EXPECT_EQ(slice.owner.name(), first.name()) << "ranks list parameters in one order";
    EXPECT_EQ(slice.owner.shape(), first.shape()) << first.name();
    const base::Interval part = slice.owner.elements();
    const base::Interval primary = slice.owner.primary();
    primary_owners.slice(0, primary.begin, primary.end) += 1;
    if (part.empty()) continue;
    ++not_empty;
    if (!slice.tensor.defined()) continue;
    ++defined;
    EXPECT_EQ(slice.tensor.numel(), part.size()) << first.name();
    const at::Tensor target = whole.slice(0, part.begin, part.end);
    const at::Tensor known = owners.slice(0, part.begin, part.end) > 0;
    EXPECT_TRUE(at::equal(target.masked_select(known), slice.tensor.masked_select(known)))
        << "ranks differ in " << first.name();
    target.copy_(slice.tensor);
    owners.slice(0, part.begin, part.end) += 1;
  }
  EXPECT_TRUE((primary_owners == 1).all().item<bool>()) << first.name();
  if (defined == 0) return {};
  EXPECT_EQ(defined, not_empty) << first.name() << " is defined on some ranks only";
  EXPECT_TRUE((owners > 0).all().item<bool>()) << "nobody owns a part of " << first.name();
  return whole.view(first.shape());
}

// ranks[r] lists the slices of rank r, in the order of parameters.
NamedTensors put_together(const std::vector<const std::vector<Slice>*>& ranks) {
  NamedTensors result;
  for (size_t i = 0; i < ranks[0]->size(); ++i) {
    std::vector<Slice> slices;
    for (const std::vector<Slice>* rank : ranks) slices.push_back(rank->at(i));
    result[slices[0].owner.name()] = whole_of(slices);
  }
  return result;
}

void expect_equal(const NamedTensors& got, const NamedTensors& expected, const std::string& what) {
  for (const auto& [name, tensor] : got) {
    EXPECT_TRUE(!tensor.defined() || expected.count(name) != 0)
        << what << " of unknown parameter " << name;
  }
  for (const auto& [name, tensor] : expected) {
    const auto found = got.find(name);
    const at::Tensor other = found == got.end() ? at::Tensor() : found->second;
    EXPECT_EQ(other.defined(), tensor.defined()) << what << " of " << name;
    if (!other.defined() || !tensor.defined()) continue;
    EXPECT_TRUE(at::equal(other, tensor)) << what << " of " << name << " differs by up to "
                                          << (other - tensor).abs().max().item<double>() << " of "
                                          << tensor.abs().max().item<double>();
  }
}

}  // namespace

Trained train_on_ranks(const Case& c, int64_t steps) {
  std::vector<RankRecord> records(c.ranks);
  harness::run_ranks(
      c.ranks, [&](comm::World& world) { records[world.rank()] = train_rank(c, world, steps); });
  Trained result;
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<const std::vector<Slice>*> grads;
    for (const RankRecord& record : records) {
      grads.push_back(&record.grads[step]);
      EXPECT_EQ(record.norms[step], records[0].norms[step]) << "one norm on all ranks";
    }
    result.steps.push_back({put_together(grads), records[0].norms[step]});
  }
  std::vector<const std::vector<Slice>*> values;
  for (const RankRecord& record : records) values.push_back(&record.values);
  result.params = put_together(values);
  return result;
}

Trained train_alone(const Case& c, int64_t steps) {
  const std::unique_ptr<ToyModel> model = harness::model_case(c.model).make(kSeed);
  Alone alone(*model, options_of(c));
  Trained result;
  for (int64_t step = 0; step < steps; ++step) result.steps.push_back(alone.run(step));
  result.params = alone.params();
  return result;
}

void expect_equal(const Trained& got, const Trained& expected) {
  ASSERT_EQ(got.steps.size(), expected.steps.size());
  for (size_t i = 0; i < got.steps.size(); ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    expect_equal(got.steps[i].grads, expected.steps[i].grads, "the gradient");
    // Sums of fewer than 2^12 squares in double, in another order: a relative error of at most 2^12
    // * 2^-53 each. The coefficient is rounded to 24 bits, so gradients agree to the bit although
    // norms need not.
    const double norm = expected.steps[i].norm;
    EXPECT_NEAR(got.steps[i].norm, norm, norm * 0x1p-40);
  }
  expect_equal(got.params, expected.params, "the value");
}

}  // namespace tessera::equivalence
