#include "optim/fused_lists.h"

#include <ATen/Version.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace tessera::optim {
namespace {

constexpr size_t kGradient = 1;

// Bytes of a SIMD vector in the kernels that ATen chose for this machine.
int64_t vector_bytes() {
  static const int64_t bytes = at::get_cpu_capability() == "AVX512" ? 64 : 32;
  return bytes;
}

int64_t numel_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

}  // namespace

int64_t FusedLists::add(const OwnedParam& param, const std::vector<at::Tensor>& tensors) {
  TESSERA_CHECK(tensors.size() == lists_.size(), "Parameter '", param.name(), "'.");
  const size_t pieces_before = lists_[0].size();
  values_.push_back(tensors[0]);
  const base::Interval slice = param.elements();
  const int64_t lanes = vector_bytes() / static_cast<int64_t>(tensors[0].element_size());
  const int64_t numel = numel_of(param.shape());
  const int64_t whole_rest = numel % lanes;
  const int64_t rest_begin = numel - whole_rest;
  // Of the slice: elements that the whole parameter updates in vectors, how many of them fill no
  // vector here, and elements of the rest.
  const int64_t in_vectors = std::max(int64_t{0}, std::min(slice.end, rest_begin) - slice.begin);
  const int64_t left_over = in_vectors % lanes;
  const int64_t rest = slice.size() - in_vectors;
  const bool rest_fits = rest == 0 || rest == whole_rest;
  if ((left_over == 0 && rest_fits) || !tensors[0].is_cpu()) {
    add_view(tensors, {0, slice.size()});
    return 1;
  }
  add_view(tensors, {0, in_vectors - left_over});
  add_padded(tensors, {in_vectors - left_over, in_vectors}, lanes, 0);
  if (rest_fits) {
    add_view(tensors, {in_vectors, slice.size()});
  } else {
    add_padded(tensors, {in_vectors, slice.size()}, whole_rest,
               slice.begin + in_vectors - rest_begin);
  }
  return static_cast<int64_t>(lists_[0].size() - pieces_before);
}

void FusedLists::add_view(const std::vector<at::Tensor>& tensors, base::Interval part) {
  if (part.empty()) return;
  for (size_t i = 0; i < tensors.size(); ++i) {
    lists_[i].push_back(part.size() == tensors[i].numel()
                            ? tensors[i]
                            : tensors[i].narrow(0, part.begin, part.size()));
  }
}

void FusedLists::add_padded(const std::vector<at::Tensor>& tensors, base::Interval part,
                            int64_t size, int64_t offset) {
  if (part.empty()) return;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor piece = at::zeros({size}, tensors[i].options().requires_grad(false));
    const at::Tensor source = piece.narrow(0, offset, part.size());
    const at::Tensor target = tensors[i].narrow(0, part.begin, part.size());
    source.copy_(target);
    lists_[i].push_back(piece);
    if (i != kGradient) padded_.push_back({source, target});
  }
}

void FusedLists::finish() {
  for (const Padded& padded : padded_) {
    padded.target.copy_(padded.source);
  }
  padded_.clear();
  // Kernels over lists do not bump versions themselves, and a backward over overwritten values must
  // throw.
  for (const at::Tensor& value : values_) value.unsafeGetTensorImpl()->bump_version();
}

}  // namespace tessera::optim
