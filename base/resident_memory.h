#ifndef BASE_RESIDENT_MEMORY_H_
#define BASE_RESIDENT_MEMORY_H_

// How much of the machine's memory this process holds, as Linux counts it. A read costs some 20 us.

#include <cstdint>

namespace tessera::base {

struct ResidentMemory {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;  // since the start of the process
};

// Errors of both: InternalError where /proc does not say.
ResidentMemory resident_memory();

// All of the machine's memory. A container's limit may be lower.
int64_t machine_memory_bytes();

}  // namespace tessera::base

#endif  // BASE_RESIDENT_MEMORY_H_
