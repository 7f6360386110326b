#include "base/allocator.h"

#include <cstdlib>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace tessera::base {

void keep_freed_memory() {
#if defined(__GLIBC__)
  constexpr int kNoLimit = 1 << 30;
  constexpr int kGrowthBytes = 32 << 20;
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") == nullptr) mallopt(M_MMAP_THRESHOLD, kNoLimit);
  if (std::getenv("MALLOC_TRIM_THRESHOLD_") == nullptr) mallopt(M_TRIM_THRESHOLD, kNoLimit);
  if (std::getenv("MALLOC_TOP_PAD_") == nullptr) mallopt(M_TOP_PAD, kGrowthBytes);
#endif
}

}  // namespace tessera::base
