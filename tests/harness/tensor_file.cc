#include "tests/harness/tensor_file.h"

#include <ATen/ATen.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

namespace tessera::harness {
namespace {

at::ScalarType scalar_type(const std::string& name) {
  if (name == "F32") return at::kFloat;
  if (name == "F64") return at::kDouble;
  if (name == "BF16") return at::kBFloat16;
  if (name == "I64") return at::kLong;
  throw std::runtime_error("unknown dtype '" + name + "'");
}

std::map<std::string, at::Tensor> parse(const std::string& file) {
  uint64_t header_bytes = 0;
  if (file.size() < sizeof(header_bytes)) throw std::runtime_error("no header");
  std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
  if (header_bytes > file.size() - sizeof(header_bytes)) throw std::runtime_error("torn header");
  const size_t data = sizeof(header_bytes) + header_bytes;
  const auto header = nlohmann::json::parse(file.substr(sizeof(header_bytes), header_bytes));

  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto shape = entry.at("shape").get<std::vector<int64_t>>();
    const auto begin = entry.at("data_offsets").at(0).get<uint64_t>();
    const auto end = entry.at("data_offsets").at(1).get<uint64_t>();
    at::Tensor tensor = at::empty(shape, scalar_type(entry.at("dtype").get<std::string>()));
    if (begin > end || end > file.size() - data || end - begin != tensor.nbytes()) {
      throw std::runtime_error("torn data of '" + name + "'");
    }
    std::memcpy(tensor.data_ptr(), file.data() + data + begin, end - begin);
    tensors.emplace(name, std::move(tensor));
  }
  return tensors;
}

}  // namespace

std::map<std::string, at::Tensor> read_tensor_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot open the tensor file '" + path + "'");
  const std::string file{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  try {
    return parse(file);
  } catch (const std::exception& error) {
    throw std::runtime_error("tensor file '" + path + "': " + error.what());
  }
}

}  // namespace tessera::harness
