#ifndef DATA_OUTPUT_FILE_H_
#define DATA_OUTPUT_FILE_H_

// An OutputFile appears under its name whole or not at all:
//
//   1. write to NAME.tmp.PID.N in the same folder
//   2. fsync
//   3. rename to NAME
//   4. fsync the folder
//
// So a reader never meets a half-written file, and a crash leaves the former file of that name as
// it was. A killed process may leave its temporary file behind; it is safe to delete.
//
// Errors: every call throws ConfigError with the file and the system's reason (disk full, no
//         permission) and removes the temporary file first; the object is of no use afterwards.
// Called by one thread.

#include <cstdint>
#include <string>

namespace tessera::data {

class OutputFile {
 public:
  // Opens the temporary file. The folder must exist.
  explicit OutputFile(std::string path);
  // Removes the temporary file unless commit() returned.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void append(const void* bytes, int64_t num_bytes);

  // Replaces bytes that were appended before, to fill in a header.
  void overwrite(int64_t offset_bytes, const void* bytes, int64_t num_bytes);

  // Step 2. commit() can then fail for lack of space no more.
  void sync();

  // Steps 2 to 4. To be called once, last.
  void commit();

  const std::string& path() const { return path_; }

 private:
  void fail(const char* action);  // removes the temporary file and throws, with errno's reason
  void discard();

  std::string path_;
  std::string temporary_path_;
  int fd_ = -1;
};

}  // namespace tessera::data

#endif  // DATA_OUTPUT_FILE_H_
