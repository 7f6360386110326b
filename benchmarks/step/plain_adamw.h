#ifndef BENCHMARKS_STEP_PLAIN_ADAMW_H_
#define BENCHMARKS_STEP_PLAIN_ADAMW_H_

// What one process without Tessera does after backward: the base line of the benchmarks. It calls
// the ATen functions that PyTorch's clip_grad_norm_() and AdamW(fused=True) call, on whole
// parameters, in the same order.

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::benchmarks {

class PlainAdamW {
 public:
  // The options are PyTorch's defaults, with this learning rate; every parameter decays.
  PlainAdamW(std::vector<at::Tensor> params, double lr);

  // Scales the gradients so that their norm over all parameters is at most max_norm; returns the
  // norm before.
  //
  // Requires: every parameter has a gradient.
  at::Tensor clip_grad_norm(double max_norm);

  // Requires: every parameter has a gradient.
  void step();

  // Makes every gradient undefined.
  void zero_grad();

 private:
  std::vector<at::Tensor> grads() const;

  double lr_;
  std::vector<at::Tensor> params_, exp_avgs_, exp_avg_sqs_, steps_;
};

}  // namespace tessera::benchmarks

#endif  // BENCHMARKS_STEP_PLAIN_ADAMW_H_
