#include "data/prepare.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "base/error.h"
#include "base/log.h"
#include "data/output_file.h"
#include "data/text_files.h"
#include "data/token_file_writer.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFormatVersion = 1;
constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr int64_t kBinaryProbeBytes = 8192;

// A source file, read block by block.
class BlockReader {
 public:
  explicit BlockReader(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    TESSERA_CHECK_CONFIG(fd_ >= 0, "cannot open ", path_, ": ", std::strerror(errno), ".");
  }
  ~BlockReader() { ::close(fd_); }
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;

  // Fills `block` to its size, with less at the end of the file; the number of bytes, 0 at the end.
  int64_t read(std::vector<uint8_t>& block) {
    int64_t size = 0;
    const int64_t capacity = static_cast<int64_t>(block.size());
    while (size < capacity) {
      const ssize_t got = ::read(fd_, block.data() + size, static_cast<size_t>(capacity - size));
      if (got < 0 && errno == EINTR) continue;
      TESSERA_CHECK_CONFIG(got >= 0, "cannot read ", path_, ": ", std::strerror(errno), ".");
      if (got == 0) break;
      size += got;
    }
    return size;
  }

 private:
  std::string path_;
  int fd_;
};

enum class Kind { kText, kBinary, kEmpty };

// Turns files into tokens; holds one block of bytes and one of tokens.
class Tokenizer {
 public:
  Tokenizer() : bytes_(kBlockBytes), tokens_(kBlockBytes) {}

  // Appends the document and the separator, where it is text.
  Kind append(const std::string& path, TokenFileWriter& writer) {
    BlockReader reader(path);
    int64_t size = reader.read(bytes_);
    if (size == 0) return Kind::kEmpty;
    if (std::memchr(bytes_.data(), 0, static_cast<size_t>(std::min(size, kBinaryProbeBytes)))) {
      return Kind::kBinary;
    }
    for (; size > 0; size = reader.read(bytes_)) {
      std::copy(bytes_.begin(), bytes_.begin() + size, tokens_.begin());
      writer.append(tokens_.data(), size);
    }
    writer.append(kByteSeparator);
    return Kind::kText;
  }

 private:
  std::vector<uint8_t> bytes_;
  std::vector<uint16_t> tokens_;
};

bool goes_to_val(const std::string& name, double fraction) {
  // The upper 53 bits as a number in [0, 1), exact in a double.
  const double position =
      static_cast<double>(XXH3_64bits(name.data(), name.size()) >> 11) * 0x1p-53;
  return position < fraction;
}

void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  TESSERA_CHECK_CONFIG(!error, "cannot make the output folder ", folder, ": ", error.message(),
                       ".");
  TESSERA_CHECK_CONFIG(fs::is_directory(folder, error), "the output ", folder, " is not a folder.");
}

void remove_file(const std::string& path) {
  std::error_code error;
  fs::remove(path, error);
  TESSERA_CHECK_CONFIG(!error, "cannot remove the former ", path, ": ", error.message(), ".");
}

void check_documents(const PrepareResult& result, int64_t num_sources,
                     const PrepareOptions& options) {
  TESSERA_CHECK_CONFIG(result.documents() > 0, "no text found in ", num_sources,
                       " paths; left out: ", result.binary_files, " binary, ", result.empty_files,
                       " empty, ", result.hidden_entries, " hidden, ", result.other_extension_files,
                       " with another extension. Name files or folders with text.");
  TESSERA_CHECK_CONFIG(result.train_documents > 0, "val_fraction ", options.val_fraction,
                       " sets all ", result.documents(),
                       " documents aside and leaves none to train on; lower it.");
  TESSERA_CHECK_CONFIG(options.val_fraction == 0.0 || result.val_documents > 0, "val_fraction ",
                       options.val_fraction, " sets none of ", result.documents(),
                       " documents aside (whole files are chosen, by the hash of their name). "
                       "Split the text into more files, raise"
                       " the fraction, or ask for none.");
}

void write_meta(OutputFile& file, const PrepareResult& result, int64_t num_sources) {
  nlohmann::ordered_json meta;
  meta["format_version"] = kFormatVersion;
  meta["tokenizer"] = "bytes";
  meta["vocab_size"] = kByteVocabSize;
  meta["separator"] = kByteSeparator;
  meta["documents"] = result.documents();
  meta["train_documents"] = result.train_documents;
  meta["val_documents"] = result.val_documents;
  meta["train_tokens"] = result.train_tokens;
  meta["val_tokens"] = result.val_tokens;
  meta["source_paths"] = num_sources;
  const std::string text = meta.dump(2) + "\n";
  file.append(text.data(), static_cast<int64_t>(text.size()));
  file.sync();
}

void log_left_out(const PrepareResult& result) {
  if (result.binary_files > 0) {
    base::log_warning(base::str("prepare: left out ", result.binary_files,
                                " binary files (a NUL byte in their first 8 KiB)"));
  }
  if (result.empty_files + result.hidden_entries + result.repeated_files + result.special_files >
      0) {
    base::log_info(base::str("prepare: left out ", result.empty_files, " empty files, ",
                             result.hidden_entries, " names that start with a dot, ",
                             result.repeated_files, " files met again, ", result.special_files,
                             " devices, sockets and pipes"));
  }
}

}  // namespace

PrepareResult prepare(const std::vector<std::string>& paths, const std::string& output_dir,
                      const PrepareOptions& options) {
  TESSERA_CHECK_CONFIG(!paths.empty(), "no text to prepare; name at least one file or folder");
  TESSERA_CHECK_CONFIG(options.val_fraction >= 0.0 && options.val_fraction < 1.0,
                       "val_fraction is ", options.val_fraction, "; expected a number in [0, 1)");
  const std::string train_path = (fs::path(output_dir) / "train.bin").string();
  const std::string val_path = (fs::path(output_dir) / "val.bin").string();
  const std::string meta_path = (fs::path(output_dir) / "meta.json").string();
  const int64_t num_sources = static_cast<int64_t>(paths.size());

  // What an earlier run wrote is not text, even where the output lies inside a source.
  const TextFiles sources =
      find_text_files(paths, options.extensions, {train_path, val_path, meta_path});
  PrepareResult result;
  result.hidden_entries = sources.num_hidden;
  result.repeated_files = sources.num_repeated;
  result.other_extension_files = sources.num_other_extension;
  result.special_files = sources.num_special;

  make_folder(output_dir);
  TokenFileWriter train(train_path);
  std::optional<TokenFileWriter> val;
  if (options.val_fraction > 0.0) val.emplace(val_path);

  Tokenizer tokenizer;
  for (const TextFile& file : sources.files) {
    const bool to_val = goes_to_val(file.name, options.val_fraction);
    const Kind kind = tokenizer.append(file.path, to_val ? *val : train);
    if (kind == Kind::kText) ++(to_val ? result.val_documents : result.train_documents);
    if (kind == Kind::kBinary) ++result.binary_files;
    if (kind == Kind::kEmpty) ++result.empty_files;
  }
  check_documents(result, num_sources, options);
  result.train_tokens = train.size();
  result.val_tokens = val ? val->size() : 0;

  // All of the new set is on the disk before anything of the old one goes.
  OutputFile meta(meta_path);
  write_meta(meta, result, num_sources);
  train.sync();
  if (val) val->sync();
  remove_file(meta_path);
  train.finish();
  if (val) {
    val->finish();
  } else {
    remove_file(val_path);
  }
  meta.commit();
  log_left_out(result);
  return result;
}

}  // namespace tessera::data
