#include "data/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.h"

namespace tessera::data {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "token files are mapped as they are, which needs a little-endian machine");

constexpr int32_t kMagicBigEndian = static_cast<int32_t>(__builtin_bswap32(kTokenMagic));
constexpr int32_t kMagicLlama3 = 20240801;  // llm.c, uint32 tokens
constexpr char kMagicLlmq[] = "BIN.TOK\n";
constexpr int64_t kFirstUnusedHeaderByte = 12;  // after magic, version and the count's low half

constexpr char kPrepareAgain[] = " Re-run tessera prepare, or copy the file again.";

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

bool all_zero(const char* bytes, int64_t begin, int64_t end) {
  return std::all_of(bytes + begin, bytes + end, [](char byte) { return byte == 0; });
}

int32_t word_at(const char* bytes, int64_t index) {
  int32_t word = 0;
  std::memcpy(&word, bytes + index * 4, 4);
  return word;
}

}  // namespace

TokenHeader make_token_header(int64_t count) {
  TESSERA_CHECK(count >= 0, "A token file of ", count, " tokens.");
  TokenHeader header{};
  header[0] = kTokenMagic;
  header[1] = kTokenVersion;
  header[2] = static_cast<int32_t>(static_cast<uint32_t>(count));
  header[3] = static_cast<int32_t>(count >> 32);
  return header;
}

TokenFile::TokenFile(std::string path, Headerless headerless) : path_(std::move(path)) {
  // O_NONBLOCK: opening a FIFO by mistake must not wait for a writer; it means nothing for regular
  // files.
  const Descriptor file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  TESSERA_CHECK_CONFIG(file.get() >= 0, "cannot open token file ", path_, ": ",
                       std::strerror(errno), ". Check the path; tessera prepare makes such files.");
  struct stat info {};
  TESSERA_CHECK_CONFIG(::fstat(file.get(), &info) == 0, "cannot stat token file ", path_, ": ",
                       std::strerror(errno), ".");
  TESSERA_CHECK_CONFIG(S_ISREG(info.st_mode), "token file ", path_,
                       " is not a regular file. Name a file, such as DIR/train.bin.");
  const int64_t file_bytes = info.st_size;
  TESSERA_CHECK_CONFIG(file_bytes > 0, "token file ", path_, " is empty (0 bytes).", kPrepareAgain);

  void* mapping =
      ::mmap(nullptr, static_cast<size_t>(file_bytes), PROT_READ, MAP_SHARED, file.get(), 0);
  TESSERA_CHECK_CONFIG(mapping != MAP_FAILED, "cannot map token file ", path_, " (", file_bytes,
                       " bytes): ", std::strerror(errno), ".");
  mapping_ = mapping;
  mapping_bytes_ = file_bytes;
  try {
    read_header(file_bytes, headerless);
  } catch (...) {
    unmap();
    throw;
  }
}

TokenFile::~TokenFile() { unmap(); }

TokenFile::TokenFile(TokenFile&& other) noexcept
    : path_(std::move(other.path_)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_bytes_(std::exchange(other.mapping_bytes_, 0)),
      tokens_(std::exchange(other.tokens_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      has_header_(other.has_header_) {}

TokenFile& TokenFile::operator=(TokenFile&& other) noexcept {
  if (this == &other) return *this;
  unmap();
  path_ = std::move(other.path_);
  mapping_ = std::exchange(other.mapping_, nullptr);
  mapping_bytes_ = std::exchange(other.mapping_bytes_, 0);
  tokens_ = std::exchange(other.tokens_, nullptr);
  size_ = std::exchange(other.size_, 0);
  has_header_ = other.has_header_;
  return *this;
}

void TokenFile::read_header(int64_t file_bytes, Headerless headerless) {
  const char* bytes = static_cast<const char*>(mapping_);
  if (file_bytes < 4 || word_at(bytes, 0) != kTokenMagic) {
    check_headerless(file_bytes, headerless);
    tokens_ = static_cast<const uint16_t*>(mapping_);
    size_ = file_bytes / 2;
    return;
  }
  TESSERA_CHECK_CONFIG(file_bytes >= kTokenHeaderBytes, "token file ", path_,
                       " is torn: expected a header of ", kTokenHeaderBytes,
                       " bytes, found a file of ", file_bytes, " bytes.", kPrepareAgain);
  TESSERA_CHECK_CONFIG(word_at(bytes, 1) == kTokenVersion, "token file ", path_, " has version ",
                       word_at(bytes, 1), ", this program reads version ", kTokenVersion, ".",
                       kPrepareAgain);
  const uint32_t low = static_cast<uint32_t>(word_at(bytes, 2));
  const int64_t count = static_cast<int64_t>(word_at(bytes, 3)) * (int64_t{1} << 32) + low;
  constexpr int64_t kMaxCount = (std::numeric_limits<int64_t>::max() - kTokenHeaderBytes) / 2;
  TESSERA_CHECK_CONFIG(count > 0 && count <= kMaxCount, "token file ", path_,
                       ": its header says that it holds ", count, " tokens.", kPrepareAgain);
  const int64_t expected_bytes = kTokenHeaderBytes + 2 * count;
  TESSERA_CHECK_CONFIG(file_bytes == expected_bytes, "token file ", path_, ": its header says ",
                       count, " tokens, which is a file of ", expected_bytes, " bytes; found ",
                       file_bytes, " bytes.", kPrepareAgain);
  has_header_ = true;
  tokens_ = reinterpret_cast<const uint16_t*>(bytes + kTokenHeaderBytes);
  size_ = count;
}

void TokenFile::check_headerless(int64_t file_bytes, Headerless headerless) const {
  const char* bytes = static_cast<const char*>(mapping_);
  const int32_t first = file_bytes >= 4 ? word_at(bytes, 0) : 0;
  TESSERA_CHECK_CONFIG(
      first != kMagicLlama3, "token file ", path_,
      " is one of llm.c's Llama-3 files with 32-bit tokens; only 16-bit tokens (magic ",
      kTokenMagic, ") can be read.");
  constexpr int64_t kLlmqBytes = sizeof(kMagicLlmq) - 1;
  TESSERA_CHECK_CONFIG(file_bytes < kLlmqBytes || std::memcmp(bytes, kMagicLlmq, kLlmqBytes) != 0,
                       "token file ", path_,
                       " is an llmq file with 32-bit tokens; only 16-bit tokens (magic ",
                       kTokenMagic, ") can be read.");
  TESSERA_CHECK_CONFIG(
      first != kMagicBigEndian, "token file ", path_,
      " was written on a big-endian machine; write it again in little-endian order.");
  TESSERA_CHECK_CONFIG(headerless == Headerless::kAllow, "token file ", path_, " starts with ",
                       first, ", expected the magic number ", kTokenMagic,
                       ". If it is a headerless nanoGPT file, give it a header (1024 bytes, see "
                       "data/token_file.h); if not,"
                       " re-run tessera prepare.");
  TESSERA_CHECK_CONFIG(file_bytes % 2 == 0, "token file ", path_, " has an odd size (", file_bytes,
                       " bytes), so it is torn or not a file of 16-bit tokens.", kPrepareAgain);
  const bool like_header = file_bytes >= kTokenHeaderBytes
                               ? all_zero(bytes, kFirstUnusedHeaderByte, kTokenHeaderBytes)
                               : all_zero(bytes, 0, file_bytes);
  TESSERA_CHECK_CONFIG(
      !like_header, "token file ", path_, " starts with ", first,
      " and then zeros, which looks like a damaged header (expected the magic number ", kTokenMagic,
      ") and not like headerless tokens.", kPrepareAgain);
}

void TokenFile::unmap() noexcept {
  if (mapping_ != nullptr) ::munmap(mapping_, static_cast<size_t>(mapping_bytes_));
  mapping_ = nullptr;
}

// The results of madvise are of no interest: it is a hint, and a kernel that cannot take it reads
// as before.
void TokenFile::expect_random_access() const {
  ::madvise(mapping_, static_cast<size_t>(mapping_bytes_), MADV_RANDOM);
}

void TokenFile::expect_sequential_access() const {
  ::madvise(mapping_, static_cast<size_t>(mapping_bytes_), MADV_SEQUENTIAL);
}

void TokenFile::will_need(int64_t begin, int64_t count) const {
  const uintptr_t page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(tokens_ + begin) / page_bytes * page_bytes;
  const uintptr_t end = reinterpret_cast<uintptr_t>(tokens_ + begin + count);
  ::madvise(reinterpret_cast<void*>(first), end - first, MADV_WILLNEED);
}

}  // namespace tessera::data
