#ifndef BASE_ALLOCATOR_H_
#define BASE_ALLOCATOR_H_

// How the C library's malloc treats memory that training frees and asks for again in every step.

namespace tessera::base {

// From now on malloc keeps freed memory, also large blocks, for the next request. By default it
// gives blocks above some megabytes back to the system, and every step pays a page fault per 4 KiB
// to have them again. Costs at most the fragmentation of the largest step. For a program's main: it
// changes the whole process. No-op where the C library is not glibc, and for settings that the user
// made by MALLOC_ variables of the environment.
void keep_freed_memory();

}  // namespace tessera::base

#endif  // BASE_ALLOCATOR_H_
