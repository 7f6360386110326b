#include "engine/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "base/math.h"

namespace tessera::engine {
namespace {

// A kept block serves a request when it is at most an eighth larger.
constexpr int64_t kSlackDivisor = 8;
constexpr int64_t kSizeStep = 4096;

}  // namespace

struct BufferPool::Block {
  std::shared_ptr<BufferPool> pool;  // set while the block is in use
  c10::DataPtr memory;
  int64_t size = 0;       // of memory
  int64_t requested = 0;  // as counted in the ledger
  Bytes kind = Bytes::kScratch;
};

std::shared_ptr<BufferPool> BufferPool::create(std::shared_ptr<ByteLedger> ledger) {
  return std::shared_ptr<BufferPool>(new BufferPool(std::move(ledger)));
}

BufferPool::~BufferPool() { trim(); }

c10::DataPtr BufferPool::allocate(int64_t bytes, Bytes kind) {
  const int64_t size = base::round_up(bytes, kSizeStep);
  Block* block = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto fit = free_.lower_bound(size);
    if (fit != free_.end() && fit->first - size <= size / kSlackDivisor) {
      block = fit->second;
      free_.erase(fit);
    }
  }
  if (block == nullptr) {
    block = new Block;
    block->memory = c10::GetCPUAllocator()->allocate(static_cast<size_t>(size));
    block->size = size;
  }
  block->pool = shared_from_this();
  block->requested = bytes;
  block->kind = kind;
  ledger_->add(kind, bytes);
  return {block->memory.get(), block, &BufferPool::release, at::kCPU};
}

void BufferPool::release(void* context) {
  Block* block = static_cast<Block*>(context);
  const std::shared_ptr<BufferPool> pool = std::move(block->pool);
  pool->ledger_->add(block->kind, -block->requested);
  std::lock_guard<std::mutex> lock(pool->mutex_);
  pool->free_.emplace(block->size, block);
}

at::Tensor BufferPool::tensor(int64_t elements, at::ScalarType dtype, Bytes kind) {
  const c10::InferenceMode no_inference(false);
  const int64_t bytes = elements * static_cast<int64_t>(c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
                       allocate(bytes, kind),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::empty({0}, dtype);
  tensor.set_(storage, 0, {elements}, {1});
  return tensor;
}

void BufferPool::trim() {
  std::multimap<int64_t, Block*> blocks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks.swap(free_);
  }
  for (auto& [size, block] : blocks) delete block;
}

void free_storage(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(0);
}

void fill_storage(const at::Tensor& tensor, c10::DataPtr memory, int64_t bytes) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(static_cast<size_t>(bytes));
}

}  // namespace tessera::engine
