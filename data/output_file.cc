#include "data/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace tessera::data {
namespace {

std::string temporary_name(const std::string& path) {
  static std::atomic<int64_t> next{0};
  return base::str(path, ".tmp.", ::getpid(), ".", next++);
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// The rename itself must survive a power cut. False, with errno, on failure.
bool sync_folder(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return false;
  // Some network file systems cannot sync a folder and say EINVAL: their rename is durable or not
  // as they please.
  const bool ok = ::fsync(fd) == 0 || errno == EINVAL;
  const int saved_errno = errno;
  ::close(fd);
  errno = saved_errno;
  return ok;
}

}  // namespace

OutputFile::OutputFile(std::string path)
    : path_(std::move(path)), temporary_path_(temporary_name(path_)) {
  fd_ =
      ::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    throw ConfigError(base::str("cannot create ", temporary_path_, ": ", std::strerror(errno),
                                ". Check that the folder exists and is writable."));
  }
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::append(const void* bytes, int64_t num_bytes) {
  TESSERA_CHECK(fd_ >= 0, "append() to ", path_, " after commit() or after an error.");
  const char* from = static_cast<const char*>(bytes);
  while (num_bytes > 0) {
    const ssize_t written = ::write(fd_, from, static_cast<size_t>(num_bytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write");
    from += written;
    num_bytes -= written;
  }
}

void OutputFile::overwrite(int64_t offset_bytes, const void* bytes, int64_t num_bytes) {
  TESSERA_CHECK(fd_ >= 0, "overwrite() of ", path_, " after commit() or after an error.");
  const char* from = static_cast<const char*>(bytes);
  while (num_bytes > 0) {
    const ssize_t written = ::pwrite(fd_, from, static_cast<size_t>(num_bytes), offset_bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write the header of");
    from += written;
    offset_bytes += written;
    num_bytes -= written;
  }
}

void OutputFile::sync() {
  TESSERA_CHECK(fd_ >= 0, "sync() of ", path_, " after commit() or an error.");
  if (::fsync(fd_) != 0) fail("fsync");
}

void OutputFile::commit() {
  TESSERA_CHECK(fd_ >= 0, "commit() of ", path_, " twice or after an error.");
  if (::fsync(fd_) != 0) fail("fsync");
  // A network file system may report a failed write only here.
  const int closing = std::exchange(fd_, -1);
  if (::close(closing) != 0) fail("close");
  if (std::rename(temporary_path_.c_str(), path_.c_str()) != 0) fail("rename to its final name");
  temporary_path_.clear();
  if (!sync_folder(folder_of(path_))) fail("fsync the folder of");
}

void OutputFile::fail(const char* action) {
  const int reason = errno;
  discard();
  throw ConfigError(base::str("cannot ", action, " ", path_, ": ", std::strerror(reason),
                              ". The unfinished file was removed; free some space or choose "
                              "another folder, and run again."));
}

void OutputFile::discard() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!temporary_path_.empty()) ::unlink(temporary_path_.c_str());
  temporary_path_.clear();
}

}  // namespace tessera::data
