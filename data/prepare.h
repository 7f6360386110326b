#ifndef DATA_PREPARE_H_
#define DATA_PREPARE_H_

// Makes token files from text, without a tokenizer: a token is a byte (0 to 255), and every
// document is followed by the separator 256. A document is a file. OUTPUT_DIR then holds
//
//   train.bin   the tokens (data/token_file.h)
//   val.bin     those of the documents set aside, where a fraction was asked for
//   meta.json   format_version 1, tokenizer "bytes", vocab_size 257, separator 256; documents,
//               train_documents, val_documents, train_tokens, val_tokens, source_paths (counts)
//
// meta.json is removed before the token files are replaced and written after them: where it is,
// they are whole and belong together. A former val.bin is removed where no fraction is asked for.
//
// The same files by name and content give the same bytes on every machine. Whether a document is
// set aside depends on its name (data/text_files.h) alone: adding documents moves none of the
// others.
//
// Cost: reads each file once, a block of 1 MiB at a time; memory does not grow with the size of the
//       text.

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::data {

constexpr int64_t kByteVocabSize = 257;
constexpr uint16_t kByteSeparator = 256;

struct PrepareOptions {
  // Which files of a folder are text, "txt" or ".txt"; none means all. Files that are named
  // themselves always are.
  std::vector<std::string> extensions;
  // In [0, 1): about this part of the documents goes to val.bin.
  double val_fraction = 0.0;
};

struct PrepareResult {
  int64_t train_documents = 0;
  int64_t val_documents = 0;
  int64_t train_tokens = 0;  // with the separators
  int64_t val_tokens = 0;
  int64_t binary_files = 0;           // left out: a NUL byte in their first 8 KiB
  int64_t empty_files = 0;            // left out
  int64_t hidden_entries = 0;         // left out: the name starts with a dot
  int64_t repeated_files = 0;         // met a second time, taken once
  int64_t other_extension_files = 0;  // left out
  int64_t special_files = 0;          // left out: devices, sockets, pipes

  int64_t documents() const { return train_documents + val_documents; }
};

// Reads `paths` (files and folders) and writes the three files; makes the folder where it is
// missing. Logs what was left out. On an error the former files of `output_dir` stay, unless the
// error is in putting the new ones in place.
//
// Errors: ConfigError: no path, a path that is missing or cannot be read, no text in any of them,
//         a folder that cannot be written, disk full, a fraction outside [0, 1) or one that leaves
//         train.bin or val.bin without a document.
PrepareResult prepare(const std::vector<std::string>& paths, const std::string& output_dir,
                      const PrepareOptions& options = {});

}  // namespace tessera::data

#endif  // DATA_PREPARE_H_
