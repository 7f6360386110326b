#include "data/token_file_writer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "data/token_file.h"

namespace tessera::data {
namespace {

constexpr int64_t kBufferTokens = int64_t{1} << 19;  // 1 MiB: large writes, small memory

}  // namespace

TokenFileWriter::TokenFileWriter(std::string path) : file_(std::move(path)) {
  buffer_.reserve(kBufferTokens);
  // Holds the place of the header; zeros, so that a temporary file is never taken for a whole one.
  const TokenHeader no_header{};
  file_.append(no_header.data(), kTokenHeaderBytes);
}

void TokenFileWriter::append(const uint16_t* tokens, int64_t count) {
  while (count > 0) {
    const int64_t room = kBufferTokens - static_cast<int64_t>(buffer_.size());
    const int64_t part = std::min(room, count);
    buffer_.insert(buffer_.end(), tokens, tokens + part);
    tokens += part;
    count -= part;
    size_ += part;
    if (part == room) flush();
  }
}

void TokenFileWriter::finish() {
  sync();
  file_.commit();
}

void TokenFileWriter::sync() {
  TESSERA_CHECK_CONFIG(size_ > 0, "token file ", file_.path(),
                       " would hold no tokens; append some before finish().");
  flush();
  const TokenHeader header = make_token_header(size_);
  file_.overwrite(0, header.data(), kTokenHeaderBytes);
  file_.sync();
}

void TokenFileWriter::flush() {
  file_.append(buffer_.data(), static_cast<int64_t>(buffer_.size()) * 2);
  buffer_.clear();
}

}  // namespace tessera::data
