#ifndef ENGINE_BUFFER_POOL_H_
#define ENGINE_BUFFER_POOL_H_

// Memory for flat buffers that come and go every step. What is given back stays here for the next
// buffer that fits, so that a step touches pages it has touched before: fresh pages from the system
// cost a fault per 4 KiB, more than the collective that fills them. (The units of a model have few
// sizes, so exact reuse is the rule.)
//
// Thread-safe. Held by shared_ptr: a buffer keeps its pool alive.

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/byte_ledger.h"

namespace tessera::engine {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  static std::shared_ptr<BufferPool> create(std::shared_ptr<ByteLedger> ledger);
  ~BufferPool();

  // At least `bytes` of uninitialized memory, aligned to 64 bytes, counted as `kind` until it is
  // freed.
  c10::DataPtr allocate(int64_t bytes, Bytes kind);

  // A 1-D tensor on such memory. Safe to make under InferenceMode.
  at::Tensor tensor(int64_t elements, at::ScalarType dtype, Bytes kind);

  // Gives what is kept for reuse back to the system.
  void trim();

 private:
  explicit BufferPool(std::shared_ptr<ByteLedger> ledger) : ledger_(std::move(ledger)) {}
  struct Block;
  static void release(void* block);

  std::shared_ptr<ByteLedger> ledger_;
  std::mutex mutex_;
  std::multimap<int64_t, Block*> free_;  // by size
};

// Frees a tensor's memory, whose Storage stays; and gives a Storage without memory some.
//
// [Note: storage identity] Autograd saves aliases of parameters for backward. They share the
// parameter's Storage, so a unit keeps one Storage for life and empties and fills it; a new Storage
// would leave the aliases behind.
void free_storage(const at::Tensor& tensor);
void fill_storage(const at::Tensor& tensor, c10::DataPtr memory, int64_t bytes);

}  // namespace tessera::engine

#endif  // ENGINE_BUFFER_POOL_H_
