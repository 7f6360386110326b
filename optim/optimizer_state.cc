#include "optim/optimizer_state.h"

#include <ATen/core/grad_mode.h>

#include <set>

#include "base/error.h"
#include "base/nearest.h"

namespace tessera::optim {
namespace {

ParamState checked_entry(const OwnedParam& param, const ParamState& entry,
                         const std::vector<std::string>& keys, const std::string& scalar_key) {
  TESSERA_CHECK_CONFIG(entry.size() == keys.size(), "the optimizer state of parameter '",
                       param.name(), "' has ", entry.size(), " tensors where ", keys.size(),
                       " are expected: it is of another optimizer or of other options.");
  const at::Tensor value = param.value();
  ParamState copy;
  for (const std::string& key : keys) {
    const auto found = entry.find(key);
    TESSERA_CHECK_CONFIG(found != entry.end(), "the optimizer state of parameter '", param.name(),
                         "' lacks '", key, "': it is of another optimizer or of other options.");
    const at::Tensor& tensor = found->second;
    if (key == scalar_key) {
      TESSERA_CHECK_CONFIG(tensor.defined() && tensor.numel() == 1, "the optimizer state '", key,
                           "' of parameter '", param.name(), "' must be one number.");
      copy[key] = tensor.detach().reshape({}).to(value.device(), at::kFloat, false, true);
      continue;
    }
    TESSERA_CHECK_CONFIG(
        tensor.defined() && tensor.dim() == 1 && tensor.numel() == value.numel(),
        "the optimizer state '", key, "' of parameter '", param.name(), "' must be 1-D with ",
        value.numel(), " elements, the part this rank owns; found ",
        tensor.defined() ? base::str(tensor.sizes()) : std::string("an undefined tensor"), ".");
    copy[key] = tensor.detach().to(value.device(), value.scalar_type(), false, true).contiguous();
  }
  return copy;
}

}  // namespace

std::vector<ParamState> checked_state(const std::vector<OwnedParam>& params,
                                      const OptimizerState& state,
                                      const std::vector<std::string>& keys,
                                      const std::string& scalar_key) {
  const at::NoGradGuard no_grad;
  std::vector<ParamState> result(params.size());
  std::set<std::string> known;
  std::vector<std::string> names;
  for (size_t i = 0; i < params.size(); ++i) {
    known.insert(params[i].name());
    names.push_back(params[i].name());
    const auto found = state.find(params[i].name());
    if (found == state.end() || params[i].elements().empty()) continue;
    result[i] = checked_entry(params[i], found->second, keys, scalar_key);
  }
  for (const auto& [name, entry] : state) {
    TESSERA_CHECK_CONFIG(known.count(name) != 0, "the optimizer state names parameter '", name,
                         "', which this model does not have; the nearest name is '",
                         base::nearest(name, names), "'.");
  }
  return result;
}

OptimizerState state_by_name(const std::vector<OwnedParam>& params,
                             const std::vector<ParamState>& state) {
  OptimizerState result;
  for (size_t i = 0; i < params.size(); ++i) {
    if (!state[i].empty()) result[params[i].name()] = state[i];
  }
  return result;
}

int64_t bytes_of(const std::vector<ParamState>& state) {
  int64_t bytes = 0;
  for (const ParamState& entry : state) {
    for (const auto& [key, tensor] : entry) bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

}  // namespace tessera::optim
