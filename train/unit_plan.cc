#include "train/unit_plan.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace tessera::train {
namespace {

// A parameter with all the places it is registered at, in model order of the first.
struct Found {
  engine::UnitParam param;
  std::vector<std::string> owners;  // paths of modules
};

std::string joined(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

void check_param(const std::string& name, const at::Tensor& tensor) {
  TESSERA_CHECK_CONFIG(tensor.layout() == at::kStrided && tensor.is_contiguous(), "parameter '",
                       name, "' is not contiguous (shape ", tensor.sizes(), ", strides ",
                       tensor.strides(), "). Register it as tensor.contiguous().");
  TESSERA_CHECK_CONFIG(tensor.device().is_cpu(), "parameter '", name, "' is on ", tensor.device(),
                       ": this build shards and replicates on CPU only.");
  TESSERA_CHECK_CONFIG(!tensor.grad().defined(), "parameter '", name,
                       "' has a gradient already: call zero_grad() before parallelize().");
}

void visit_modules(torch::nn::Module& module, const std::string& path,
                   const std::function<void(torch::nn::Module&, const std::string&)>& visit) {
  visit(module, path);
  for (const auto& child : module.named_children()) {
    visit_modules(*child.value(), joined(path, child.key()), visit);
  }
}

std::vector<Found> find_params(torch::nn::Module& root) {
  std::vector<Found> found;
  std::map<const void*, size_t> index;
  visit_modules(root, "", [&](torch::nn::Module& module, const std::string& path) {
    const auto* point = dynamic_cast<const engine::HookPoint*>(&module);
    TESSERA_CHECK_CONFIG(point == nullptr || point->forward_hook() == nullptr,
                         path.empty() ? "the model" : "module '" + path + "'", " (type ",
                         module.name(),
                         ") was parallelized already. Call parallelize() once per model.");
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = entry.value();
      const std::string name = joined(path, entry.key());
      const auto [at, is_new] = index.emplace(tensor.unsafeGetTensorImpl(), found.size());
      if (is_new) {
        check_param(name, tensor);
        found.push_back({{name, tensor}, {}});
      }
      found[at->second].owners.push_back(path);
    }
  });
  return found;
}

engine::HookPoint* hook_point(torch::nn::Module& module, const std::string& what) {
  auto* point = dynamic_cast<engine::HookPoint*>(&module);
  TESSERA_CHECK_CONFIG(
      point != nullptr, what, " (type ", module.name(),
      ") cannot be a unit: its forward cannot be hooked. Declare its holder with "
      "TESSERA_MODULE(Name) in place "
      "of TORCH_MODULE(Name), and make it through the holder, not by make_shared<NameImpl>.");
  return point;
}

// Splits a site's parameters by (dtype, requires_grad), in order of first appearance.
std::vector<PlannedUnit> split_by_kind(const std::string& name,
                                       const std::vector<engine::UnitParam>& params) {
  using Kind = std::pair<at::ScalarType, bool>;
  std::vector<Kind> kinds;
  std::vector<PlannedUnit> units;
  for (const engine::UnitParam& param : params) {
    const Kind kind{param.tensor.scalar_type(), param.tensor.requires_grad()};
    const size_t k = std::find(kinds.begin(), kinds.end(), kind) - kinds.begin();
    if (k == kinds.size()) {
      kinds.push_back(kind);
      const std::string shown = name.empty() ? "root" : name;
      units.push_back({k == 0 ? shown : base::str(shown, "#", k), {}});
    }
    units[k].params.push_back(param);
  }
  return units;
}

bool is_inside(const std::string& path, const std::string& site) {
  return site.empty() || path == site ||
         (path.size() > site.size() && path.compare(0, site.size(), site) == 0 &&
          path[site.size()] == '.');
}

}  // namespace

std::vector<PlannedSite> plan_units(torch::nn::Module& root, const UnitRule& rule) {
  std::vector<PlannedSite> sites{{"", hook_point(root, "the model itself"), {}}};
  std::vector<std::pair<std::string, engine::HookPoint*>> picked;
  visit_modules(root, "", [&](torch::nn::Module& module, const std::string& path) {
    if (path.empty() || !rule || !rule(module)) return;
    picked.emplace_back(path, hook_point(module, "module '" + path + "'"));
  });
  TESSERA_CHECK_CONFIG(!rule || !picked.empty(),
                       "the unit rule picks no module of the model: its units would be the whole "
                       "model at once. Name a module type that the model has (units_of<Block>()).");
  std::map<std::string, std::vector<engine::UnitParam>> params;  // by site
  for (const Found& found : find_params(root)) {
    // The innermost picked module around each place; different ones: the root.
    std::string home;
    for (size_t o = 0; o < found.owners.size(); ++o) {
      std::string innermost;
      for (const auto& [path, point] : picked) {
        if (is_inside(found.owners[o], path) && path.size() > innermost.size()) innermost = path;
      }
      home = o == 0 || home == innermost ? innermost : "";
      if (home.empty()) break;
    }
    params[home].push_back(found.param);
  }
  sites[0].units = split_by_kind("", params[""]);
  for (const auto& [path, point] : picked) {
    if (params[path].empty()) continue;
    sites.push_back({path, point, split_by_kind(path, params[path])});
  }
  return sites;
}

std::vector<PlannedSite> plan_buckets(torch::nn::Module& root, int64_t first_bucket_bytes,
                                      int64_t bucket_bytes) {
  PlannedSite site{"", hook_point(root, "the model itself"), {}};
  std::vector<Found> found = find_params(root);
  std::reverse(found.begin(), found.end());
  std::vector<engine::UnitParam> params;
  for (const Found& f : found) params.push_back(f.param);
  bool is_first = true;  // of those that are reduced
  for (const PlannedUnit& kind : split_by_kind("", params)) {
    const bool trainable = kind.params[0].tensor.requires_grad();
    int64_t room = 0;  // in the bucket that is being filled
    for (const engine::UnitParam& param : kind.params) {
      const auto size = static_cast<int64_t>(param.tensor.nbytes());
      const bool alone = size * 2 >= bucket_bytes;
      if (size > room || alone) {
        site.units.push_back({base::str("bucket ", site.units.size()), {}});
        room = is_first && trainable ? first_bucket_bytes : bucket_bytes;
        is_first = is_first && !trainable;
      }
      site.units.back().params.push_back(param);
      room = alone ? 0 : room - size;
    }
  }
  return {site};
}

std::string fingerprint(const std::vector<PlannedSite>& sites, const torch::nn::Module& root) {
  std::ostringstream out;
  for (const PlannedSite& site : sites) {
    for (const PlannedUnit& unit : site.units) {
      out << "unit '" << unit.name << "'\n";
      for (const engine::UnitParam& param : unit.params) {
        out << "parameter '" << param.name << "' " << param.tensor.sizes() << ' '
            << param.tensor.scalar_type() << (param.tensor.requires_grad() ? "" : " frozen")
            << '\n';
      }
    }
  }
  for (const auto& buffer : root.named_buffers()) {
    out << "buffer '" << buffer.key() << "' " << buffer.value().sizes() << ' '
        << buffer.value().scalar_type() << '\n';
  }
  return out.str();
}

}  // namespace tessera::train
