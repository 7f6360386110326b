#include "engine/owned_param.h"

#include "base/error.h"

namespace tessera {
namespace {

// The part of `flat`, which holds `elements`, that lies in `part`.
at::Tensor cut(const at::Tensor& flat, base::Interval elements, base::Interval part) {
  if (!flat.defined() || part == elements) return flat;
  return flat.detach().narrow(0, part.begin - elements.begin, part.size());
}

}  // namespace

at::Tensor OwnedParam::value() const {
  TESSERA_CHECK_CONFIG(
      param_.numel() == elements_.size() && param_.storage().unsafeGetStorageImpl() == home_,
      "parameter '", name_, "' holds ", param_.numel(),
      " elements that are not this rank's part of ", elements_.size(),
      ": its unit is unsharded. Read and update owned parameters between steps, "
      "after backward has ended; a forward without a backward belongs under NoGradGuard.");
  // A detached view shares the version counter with the parameter.
  return param_.dim() == 1 ? param_ : param_.detach().view({-1});
}

at::Tensor OwnedParam::grad() const {
  const at::Tensor& grad = param_.grad();
  if (!grad.defined()) return grad;
  TESSERA_CHECK_CONFIG(grad.numel() == elements_.size(), "the gradient of parameter '", name_,
                       "' holds ", grad.numel(), " elements where this rank's part has ",
                       elements_.size(), ". Use gradients after backward has ended.");
  return grad.dim() == 1 ? grad : grad.detach().view({-1});
}

void OwnedParam::clear_grad() const { param_.mutable_grad() = at::Tensor(); }

at::Tensor OwnedParam::primary_value() const { return cut(value(), elements_, primary_); }

at::Tensor OwnedParam::primary_grad() const { return cut(grad(), elements_, primary_); }

}  // namespace tessera
