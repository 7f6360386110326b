// Goal: flat buffers reuse memory, keep their Storage's identity and are counted to the byte.
// Method: addresses and ledger counts after every operation.

#include "engine/buffer_pool.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace tessera::engine {
namespace {

class BufferPoolTest : public testing::Test {
 protected:
  int64_t live(Bytes kind) const { return ledger_->live(kind); }

  std::shared_ptr<ByteLedger> ledger_ = std::make_shared<ByteLedger>();
  std::shared_ptr<BufferPool> pool_ = BufferPool::create(ledger_);
};

TEST_F(BufferPoolTest, CountsWhatWasAskedForByKindUntilItIsFreed) {
  {
    const c10::DataPtr a = pool_->allocate(1000, Bytes::kScratch);
    const at::Tensor b = pool_->tensor(10, at::kBFloat16, Bytes::kFullParams);
    EXPECT_EQ(live(Bytes::kScratch), 1000);
    EXPECT_EQ(live(Bytes::kFullParams), 20);
    EXPECT_EQ(live(Bytes::kFullGrads), 0);
    const c10::DataPtr c = pool_->allocate(24, Bytes::kScratch);
    EXPECT_EQ(live(Bytes::kScratch), 1024);
  }
  EXPECT_EQ(live(Bytes::kScratch), 0);
  EXPECT_EQ(live(Bytes::kFullParams), 0);
  EXPECT_EQ(ledger_->peak(Bytes::kScratch), 1024);
  EXPECT_EQ(ledger_->peak(Bytes::kFullParams), 20);
  const c10::DataPtr d = pool_->allocate(8, Bytes::kScratch);
  ledger_->reset_peaks();
  EXPECT_EQ(ledger_->peak(Bytes::kScratch), 8) << "what is live";
  EXPECT_EQ(ledger_->peak(Bytes::kFullParams), 0);
}

TEST_F(BufferPoolTest, MemoryIsAlignedTo64Bytes) {
  std::vector<c10::DataPtr> held;
  for (const int64_t bytes : {1, 2, 63, 64, 65, 4095, 4097, 1'000'003}) {
    held.push_back(pool_->allocate(bytes, Bytes::kScratch));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(held.back().get()) % 64, 0u) << bytes;
  }
}

TEST_F(BufferPoolTest, AFreedBlockServesTheNextRequestOfItsSizeAndNoSmallOne) {
  void* first = nullptr;
  {
    const c10::DataPtr a = pool_->allocate(1 << 20, Bytes::kScratch);
    first = a.get();
  }
  const c10::DataPtr small = pool_->allocate(1 << 10, Bytes::kScratch);
  EXPECT_NE(small.get(), first) << "a thousandth of it";
  const c10::DataPtr same = pool_->allocate(1 << 20, Bytes::kFullGrads);
  EXPECT_EQ(same.get(), first);
  const c10::DataPtr other = pool_->allocate(1 << 20, Bytes::kFullGrads);
  EXPECT_NE(other.get(), first) << "in use";
}

TEST_F(BufferPoolTest, ABlockAtMostAnEighthLargerIsReusedAndCountedAsAskedFor) {
  void* first = pool_->allocate(9 << 16, Bytes::kScratch).get();
  {
    const c10::DataPtr fits = pool_->allocate(8 << 16, Bytes::kScratch);
    EXPECT_EQ(fits.get(), first);
    EXPECT_EQ(live(Bytes::kScratch), 8 << 16);
  }
  EXPECT_NE(pool_->allocate(7 << 16, Bytes::kScratch).get(), first);
}

TEST_F(BufferPoolTest, ATensorWorksInAndOutsideInferenceMode) {
  at::Tensor tensor;
  {
    const c10::InferenceMode inference;
    tensor = pool_->tensor(7, at::kFloat, Bytes::kFullParams);
  }
  EXPECT_FALSE(tensor.is_inference());
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({7}));
  EXPECT_TRUE(tensor.is_contiguous());
  tensor.fill_(3.0);
  EXPECT_EQ(tensor.sum().item<double>(), 21.0);
  EXPECT_EQ(pool_->tensor(0, at::kFloat, Bytes::kFullParams).numel(), 0);
}

// See [Note: storage identity].
TEST_F(BufferPoolTest, FreeAndFillKeepTheStorageThatAliasesShare) {
  const at::Tensor tensor = pool_->tensor(100, at::kFloat, Bytes::kFullParams);
  const at::Tensor alias = tensor.narrow(0, 50, 50);
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto version = tensor._version();
  free_storage(tensor);
  EXPECT_EQ(live(Bytes::kFullParams), 0);
  EXPECT_EQ(tensor.storage().nbytes(), 0u);
  EXPECT_EQ(tensor.numel(), 100) << "the shape stays";
  fill_storage(tensor, pool_->allocate(400, Bytes::kFullParams), 400);
  EXPECT_EQ(live(Bytes::kFullParams), 400);
  EXPECT_EQ(tensor.storage().unsafeGetStorageImpl(), storage);
  EXPECT_EQ(tensor._version(), version);
  tensor.copy_(at::arange(100, at::kFloat));
  EXPECT_TRUE(at::equal(alias, at::arange(50, 100, at::kFloat)));
  free_storage(tensor);
  free_storage(tensor);
  EXPECT_EQ(live(Bytes::kFullParams), 0) << "twice is once";
}

TEST_F(BufferPoolTest, TrimGivesFreeMemoryBackAndLeavesWhatIsInUse) {
  const at::Tensor kept = pool_->tensor(1000, at::kFloat, Bytes::kScratch).fill_(5.0);
  pool_->allocate(1 << 20, Bytes::kScratch);
  pool_->trim();
  pool_->trim();
  EXPECT_EQ(kept.sum().item<double>(), 5000.0);
  EXPECT_EQ(live(Bytes::kScratch), 4000);
  const c10::DataPtr again = pool_->allocate(1 << 20, Bytes::kScratch);
  EXPECT_NE(again.get(), nullptr);
}

TEST_F(BufferPoolTest, ABufferKeepsItsPoolAlive) {
  at::Tensor tensor = pool_->tensor(10, at::kFloat, Bytes::kScratch);
  const std::weak_ptr<BufferPool> watched = pool_;
  pool_.reset();
  EXPECT_FALSE(watched.expired());
  tensor.fill_(1.0);
  tensor = at::Tensor();
  EXPECT_TRUE(watched.expired());
  EXPECT_EQ(live(Bytes::kScratch), 0);
}

TEST_F(BufferPoolTest, ThreadsGetMemoryOfTheirOwn) {
  const auto work = [&](int value) {
    for (int i = 0; i < 500; ++i) {
      const c10::DataPtr memory = pool_->allocate(4096, Bytes::kScratch);
      auto* numbers = static_cast<volatile int*>(memory.get());
      for (int j = 0; j < 64; ++j) numbers[j] = value;
      for (int j = 0; j < 64; ++j) ASSERT_EQ(numbers[j], value);
    }
  };
  std::vector<std::thread> threads;
  for (int value = 0; value < 4; ++value) threads.emplace_back(work, value);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(live(Bytes::kScratch), 0);
  EXPECT_LE(ledger_->peak(Bytes::kScratch), 4 * 4096);
}

}  // namespace
}  // namespace tessera::engine
