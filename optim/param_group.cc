#include "optim/param_group.h"

#include <set>

#include "base/error.h"

namespace tessera::optim {

void check_names(const std::string& optimizer, const std::vector<OwnedParam>& params) {
  std::set<std::string> seen;
  for (const OwnedParam& param : params) {
    TESSERA_CHECK_CONFIG(seen.insert(param.name()).second, optimizer,
                         ": two parameters are named '", param.name(),
                         "'. Pass each parameter once.");
  }
}

}  // namespace tessera::optim
