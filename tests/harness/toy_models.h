#ifndef TESTS_HARNESS_TOY_MODELS_H_
#define TESTS_HARNESS_TOY_MODELS_H_

// Small models with what breaks trainers: odd sizes, tied, frozen and unused parameters, parameters
// used by some ranks only. One interface over all of them, so that a suite is written once:
//
//   for (const ModelCase& model_case : model_cases()) { auto model = model_case.make(seed); ... }
//
//   mlp        three blocks of odd widths with skips, and a parameter of the root
//   tied       an embedding whose weight is also the head, around two blocks
//   partial    frozen parameters, unused ones in a unit and in the root, and some that a flag in
//              the input turns on
//   llama      apps/llama.h with the smallest sizes that have all of its parts

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::harness {

struct Batch {
  at::Tensor input;
  at::Tensor target;
  at::Tensor flag;  // int64, one element; only partial has it
};

class ToyModel {
 public:
  virtual ~ToyModel() = default;

  // The mean over the batch, in fp32.
  virtual at::Tensor loss(const Batch& batch) = 0;

  // Fixed by its arguments, and of one size for all of them, so that means over ranks and
  // micro-batches are means over all rows.
  virtual Batch batch(int64_t step, int64_t micro_batch, int64_t rank) const = 0;

  virtual std::shared_ptr<torch::nn::Module> root() = 0;

  // Whether a module below the root is a unit.
  virtual bool is_unit(const torch::nn::Module& module) const = 0;

  // As root()->named_parameters(), a tied parameter once, under the first of its names.
  std::vector<std::pair<std::string, at::Tensor>> parameters();
};

struct ModelCase {
  std::string name;
  // The same seed gives the same start values. May be called from several threads at once, although
  // torch's generator is one per process.
  std::function<std::unique_ptr<ToyModel>(uint64_t seed)> make;
};

const std::vector<ModelCase>& model_cases();

// Errors: std::out_of_range for an unknown name.
const ModelCase& model_case(const std::string& name);

}  // namespace tessera::harness

#endif  // TESTS_HARNESS_TOY_MODELS_H_
