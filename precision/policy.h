#ifndef PRECISION_POLICY_H_
#define PRECISION_POLICY_H_

// A cast policy: which dtype parameters have in forward and backward, and in which gradients are
// added over ranks. Master parameters stay fp32 in every mode; they are what the user, the
// optimizer and checkpoints see between steps.

#include <c10/core/ScalarType.h>

namespace tessera::precision {

struct Policy {
  // Of the parameters in forward and backward (in the sharded mode also on the way: a bf16 gather
  // moves half the bytes).
  c10::ScalarType param_dtype = c10::kFloat;
  // Of full gradients on the way between ranks. The sum over ranks is taken in fp32 (Gloo path) or
  // in this dtype.
  c10::ScalarType reduce_dtype = c10::kFloat;
  // Floating-point tensors given to a unit's forward are cast to param_dtype.
  bool cast_forward_inputs = true;
};

// Nothing is cast; a forward input keeps its dtype.
inline Policy fp32() { return {c10::kFloat, c10::kFloat, /*cast_forward_inputs=*/false}; }

// bf16 compute, fp32 masters and fp32 reduction.
inline Policy bf16() { return {c10::kBFloat16, c10::kFloat, /*cast_forward_inputs=*/true}; }

}  // namespace tessera::precision

#endif  // PRECISION_POLICY_H_
