// Goal: one norm for all ranks and strategies, and PyTorch's way to clip. Method: parameters cut
// over imagined ranks, against double arithmetic on the whole.

#include "optim/clip_grad_norm.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "tests/optim/owned_params_for_test.h"

namespace tessera::optim {
namespace {

double alone(double sum) { return sum; }

const std::vector<std::vector<int64_t>> kShapes = {{5, 3}, {1, 17}, {3}, {}, {211, 401}};

double expected_norm() {
  double sum = 0.0;
  for (size_t i = 0; i < kShapes.size(); ++i) {
    sum += numbers(kShapes[i], i).to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(sum);
}

// The parameters of one of `ranks`, cut evenly or replicated, with gradients.
std::vector<TestParam> params_of(int64_t ranks, int64_t rank, bool sharded) {
  std::vector<TestParam> params;
  for (size_t i = 0; i < kShapes.size(); ++i) {
    const std::string name = "p" + std::to_string(i);
    const at::Tensor whole = at::ones(kShapes[i]);
    params.push_back(sharded ? shard_of(name, whole, base::even_part(whole.numel(), ranks, rank))
                             : replica_of(name, whole, ranks, rank));
    set_grad(params.back(), numbers(kShapes[i], i));
  }
  return params;
}

// What this rank adds to the sum.
double local_sum(const std::vector<TestParam>& params) {
  double sum = 0.0;
  grad_norm(owned(params), [&](double local) { return sum = local; });
  return sum;
}

// Squares are exact in double, sums of n of them have a relative error of at most n * 2^-53, and n
// is below 2^17.
constexpr double kRelativeBound = 0x1p-36;

TEST(GradNorm, IsTheSameForEveryCut) {
  const double expected = expected_norm();
  for (const bool sharded : {true, false}) {
    for (int64_t ranks = 1; ranks <= 5; ++ranks) {
      double sum = 0.0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        sum += local_sum(params_of(ranks, rank, sharded));
      }
      EXPECT_NEAR(std::sqrt(sum), expected, expected * kRelativeBound)
          << (sharded ? "sharded" : "replicated") << " over " << ranks;
    }
  }
}

TEST(GradNorm, AsksTheOtherRanksExactlyOnceAlsoWithNothingToAdd) {
  int calls = 0;
  const double norm = grad_norm({}, [&](double local) {
    ++calls;
    EXPECT_EQ(local, 0.0);
    return 9.0;
  });
  EXPECT_EQ(norm, 3.0);
  EXPECT_EQ(calls, 1);
}

TEST(GradNorm, AccumulatesLowPrecisionInDouble) {
  // In bf16 a sum of equal squares stops growing at 256 of them.
  const at::Tensor grad = at::full({10000}, 1e-3).to(at::kBFloat16);
  TestParam param = whole_of("w", at::zeros({10000}, at::kBFloat16));
  set_grad(param, grad);
  const double element = grad[0].item<double>();
  EXPECT_NEAR(grad_norm({param.owned}, alone), 100 * element, 100 * element * kRelativeBound);
}

TEST(ClipGradNorm, ClipsAsPyTorchDoes) {
  const std::vector<TestParam> params = params_of(1, 0, false);
  std::vector<at::Tensor> reference;
  for (size_t i = 0; i < kShapes.size(); ++i) {
    reference.push_back(at::ones(kShapes[i]).requires_grad_(true));
    reference.back().mutable_grad() = numbers(kShapes[i], i);
  }
  const double norm = clip_grad_norm(owned(params), 0.5, alone);
  EXPECT_NEAR(norm, expected_norm(), expected_norm() * kRelativeBound);
  torch::nn::utils::clip_grad_norm_(reference, 0.5);
  for (size_t i = 0; i < kShapes.size(); ++i) {
    const at::Tensor difference = (params[i].tensor.grad() - reference[i].grad()).abs();
    // PyTorch sums in single precision: of 2^17 numbers in blocks, so well within 2^-17 of the
    // norm, and the elements are at most 2 * coefficient.
    EXPECT_LE(difference.max().item<double>(), 2 * (0.5 / norm) * 0x1p-17);
  }
  EXPECT_NEAR(grad_norm(owned(params), alone), 0.5, 0.5 * (1e-6 / norm + 0x1p-22));
}

TEST(ClipGradNorm, MultipliesByTheRoundedCoefficientAndNothingElse) {
  const std::vector<TestParam> params = params_of(1, 0, false);
  const double norm = clip_grad_norm(owned(params), 0.5, alone);
  for (size_t i = 0; i < kShapes.size(); ++i) {
    EXPECT_TRUE(same(params[i].tensor.grad(), numbers(kShapes[i], i) * (0.5 / (norm + 1e-6))));
  }
}

TEST(ClipGradNorm, ClipsAllOfAReplicatedGradient) {
  // This rank answers for a third, but updates, and so clips, everything.
  const std::vector<TestParam> params = params_of(3, 1, false);
  const double sum = expected_norm() * expected_norm();
  const double norm = clip_grad_norm(owned(params), 0.5, [&](double) { return sum; });
  for (size_t i = 0; i < kShapes.size(); ++i) {
    EXPECT_TRUE(same(params[i].tensor.grad(), numbers(kShapes[i], i) * (0.5 / (norm + 1e-6))));
  }
}

TEST(ClipGradNorm, LeavesSmallGradientsAlone) {
  const std::vector<TestParam> params = params_of(1, 0, false);
  clip_grad_norm(owned(params), 1e6, alone);
  for (size_t i = 0; i < kShapes.size(); ++i) {
    EXPECT_TRUE(same(params[i].tensor.grad(), numbers(kShapes[i], i)));
  }
}

TEST(ClipGradNorm, LeavesGradientsAloneWhenTheNormIsNotFinite) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double other : {inf, nan}) {
    // The bad number is on another rank.
    const std::vector<TestParam> params = params_of(2, 0, true);
    const double norm =
        clip_grad_norm(owned(params), 0.5, [&](double local) { return local + other; });
    EXPECT_FALSE(std::isfinite(norm));
    for (size_t i = 0; i < kShapes.size(); ++i) {
      const base::Interval part = params[i].owned.elements();
      EXPECT_TRUE(same(params[i].owned.grad(),
                       numbers(kShapes[i], i).flatten().slice(0, part.begin, part.end)));
    }
  }
}

TEST(ClipGradNorm, UndefinedGradientsStayUndefined) {
  std::vector<TestParam> params = params_of(1, 0, false);
  params[1].tensor.mutable_grad() = at::Tensor();
  clip_grad_norm(owned(params), 0.5, alone);
  EXPECT_FALSE(params[1].tensor.grad().defined());
}

TEST(ClipGradNorm, RefusesANormThatIsNotPositive) {
  EXPECT_THROW(clip_grad_norm({}, 0.0, alone), ConfigError);
  EXPECT_THROW(clip_grad_norm({}, -1.0, alone), ConfigError);
  EXPECT_THROW(clip_grad_norm({}, std::numeric_limits<double>::quiet_NaN(), alone), ConfigError);
}

}  // namespace
}  // namespace tessera::optim
