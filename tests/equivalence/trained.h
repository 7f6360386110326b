#ifndef TESTS_EQUIVALENCE_TRAINED_H_
#define TESTS_EQUIVALENCE_TRAINED_H_

// Trains a toy model with Tessera on several ranks and puts what the ranks own together to whole
// tensors, to be compared with harness::Alone.

#include <string>
#include <vector>

#include "tests/harness/alone.h"
#include "tests/harness/toy_models.h"
#include "train/parallelize.h"

namespace tessera::equivalence {

struct Case {
  std::string model;
  Strategy strategy = Strategy::kReplicate;
  int ranks = 1;
  int64_t micro_batches = 1;
  bool clip = false;
  harness::Update update = harness::Update::kSgd;
  bool bf16 = false;
};

// Small enough to clip every step of every model.
inline constexpr double kMaxNorm = 0.05;
inline constexpr uint64_t kSeed = 7;

struct Trained {
  std::vector<harness::Alone::Step> steps;
  harness::NamedTensors params;  // after the last step
};

// By Tessera. Checks on the way, as EXPECTs, that what ranks own covers every parameter, that
// elements owned by several ranks have the same bits on all of them, and that primary parts cover
// each element exactly once.
Trained train_on_ranks(const Case& c, int64_t steps);

// By the oracle.
Trained train_alone(const Case& c, int64_t steps);

// EXPECTs the same bits in every gradient, parameter and, up to the order of a sum in double, norm.
void expect_equal(const Trained& got, const Trained& expected);

}  // namespace tessera::equivalence

#endif  // TESTS_EQUIVALENCE_TRAINED_H_
