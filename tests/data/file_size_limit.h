#ifndef TESTS_DATA_FILE_SIZE_LIMIT_H_
#define TESTS_DATA_FILE_SIZE_LIMIT_H_

#include <sys/resource.h>

#include <csignal>

namespace tessera::data {

// While it lives, a write past `bytes` of any file fails with EFBIG, as it does with ENOSPC on a
// full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : former_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &former_limit_);
    rlimit limit = former_limit_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &former_limit_);
    std::signal(SIGXFSZ, former_handler_);
  }

 private:
  rlimit former_limit_{};
  void (*former_handler_)(int);
};

}  // namespace tessera::data

#endif  // TESTS_DATA_FILE_SIZE_LIMIT_H_
