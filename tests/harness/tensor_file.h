#ifndef TESTS_HARNESS_TENSOR_FILE_H_
#define TESTS_HARNESS_TENSOR_FILE_H_

// Named tensors from a file, for values that were computed elsewhere and are committed with a test.
// The layout is that of safetensors: the length of a JSON header (u64, little endian), the header,
// the tensors' bytes.

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace tessera::harness {

// Reads F32, F64, BF16 and I64 tensors; the header's __metadata__ is skipped.
//
// Errors: std::runtime_error with the path for a file that is missing, torn or has another type in
//         it.
std::map<std::string, at::Tensor> read_tensor_file(const std::string& path);

}  // namespace tessera::harness

#endif  // TESTS_HARNESS_TENSOR_FILE_H_
