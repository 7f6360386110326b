#ifndef DATA_TOKEN_FILE_WRITER_H_
#define DATA_TOKEN_FILE_WRITER_H_

// A TokenFileWriter streams tokens into a token file (format: data/token_file.h). The file appears
// under its name when finish() returns, whole and on the disk; until then, and after an error, a
// former file of that name stays.
//
// Life:   TokenFileWriter writer(path); writer.append(...) as often as wanted; writer.finish();
// Bytes:  a buffer of 1 MiB, however long the file.
// Errors: ConfigError from every call, with the file and the system's reason (disk full, no
//         permission); the temporary file is removed.
// Called by one thread.

#include <cstdint>
#include <string>
#include <vector>

#include "data/output_file.h"

namespace tessera::data {

class TokenFileWriter {
 public:
  explicit TokenFileWriter(std::string path);

  void append(const uint16_t* tokens, int64_t count);
  void append(uint16_t token) { append(&token, 1); }

  // Writes the header and puts the file in place. To be called once, last: a writer that is
  // destroyed without it leaves no file.
  // Errors: also ConfigError when there is not one token: nobody can read such a file.
  void finish();
  // All but the last step of finish(): the file is whole and on the disk, under its temporary name.
  void sync();

  // Tokens appended so far.
  int64_t size() const { return size_; }
  const std::string& path() const { return file_.path(); }

 private:
  void flush();

  OutputFile file_;
  std::vector<uint16_t> buffer_;
  int64_t size_ = 0;
};

}  // namespace tessera::data

#endif  // DATA_TOKEN_FILE_WRITER_H_
