#ifndef DATA_TOKEN_FILE_H_
#define DATA_TOKEN_FILE_H_

// A TokenFile is a file of token ids below 65536, mapped into memory and read only. The format is
// llm.c's for GPT-2, all numbers little-endian:
//
//   bytes [0, 1024)        256 int32: {20240520, 1 (version), count low, count high, 0, 0, ...}
//   bytes [1024, ...)      count uint16 tokens, and not a byte more
//
// count = low 32 bits + 2^32 * high 32 bits. llm.c knows only an int32 in the third field and zeros
// after it: files of up to 2^31 - 1 tokens are the same byte for byte, and llm.c refuses longer
// ones (it finds a negative count or a wrong file size).
//
// Headerless files (nanoGPT's .bin: uint16 tokens from byte 0) are read only where the caller says
// kAllow, and never by falling back from a header that is damaged. Also under kAllow, a file is
// refused that
//   - starts with the magic number but has a wrong version or size: that is torn, not tokens;
//   - starts with the magic of a related format (llm.c's Llama-3 files, llmq's), or with ours in
//     big-endian order;
//   - has only zeros in bytes [12, 1024), as headers do: the header's first words were lost;
//   - is shorter than a header and all zeros;
//   - has an odd size.
//
// Cost: address space of the file's size; pages are read when touched and belong to the page cache.
//       The file must not be truncated while it is open (the kernel answers a read past its end
//       with SIGBUS); writing through TokenFileWriter, which renames, is safe.
// Reading from several threads is safe.
// Source: karpathy/llm.c, dev/data/data_common.py; karpathy/nanoGPT, data/openwebtext/prepare.py.

#include <array>
#include <cstdint>
#include <string>

namespace tessera::data {

constexpr int64_t kTokenHeaderWords = 256;
constexpr int64_t kTokenHeaderBytes = kTokenHeaderWords * 4;
constexpr int32_t kTokenMagic = 20240520;
constexpr int32_t kTokenVersion = 1;

using TokenHeader = std::array<int32_t, kTokenHeaderWords>;

// The header of a file of `count` tokens. Requires count >= 0.
TokenHeader make_token_header(int64_t count);

enum class Headerless { kRefuse, kAllow };

class TokenFile {
 public:
  // Maps the file and checks its header and its size.
  // Errors: ConfigError that names the file: missing, unreadable, not a regular file, empty, wrong
  //         magic or version, a size that is not what the header says (expected and found bytes),
  //         an odd size, no tokens.
  explicit TokenFile(std::string path, Headerless headerless = Headerless::kRefuse);
  ~TokenFile();
  TokenFile(TokenFile&& other) noexcept;
  TokenFile& operator=(TokenFile&& other) noexcept;

  const std::string& path() const { return path_; }
  // The number of tokens, at least 1.
  int64_t size() const { return size_; }
  // size() tokens, valid as long as this object (or the one it was moved to).
  const uint16_t* data() const { return tokens_; }
  uint16_t operator[](int64_t position) const { return tokens_[position]; }
  bool has_header() const { return has_header_; }

  // Hints for the kernel; they change speed only. Random access reads no pages ahead of those
  // touched.
  void expect_random_access() const;
  void expect_sequential_access() const;
  // Starts reading tokens [begin, begin + count) without waiting. Requires them to be inside the
  // file.
  void will_need(int64_t begin, int64_t count) const;

 private:
  void read_header(int64_t file_bytes, Headerless headerless);
  void check_headerless(int64_t file_bytes, Headerless headerless) const;
  void unmap() noexcept;

  std::string path_;
  void* mapping_ = nullptr;
  int64_t mapping_bytes_ = 0;
  const uint16_t* tokens_ = nullptr;
  int64_t size_ = 0;
  bool has_header_ = false;
};

}  // namespace tessera::data

#endif  // DATA_TOKEN_FILE_H_
