#ifndef DATA_TEXT_FILES_H_
#define DATA_TEXT_FILES_H_

// The files that a list of paths means, in an order that depends on names only: the paths in the
// order given; a folder stands for the regular files below it, sorted by their path from the folder
// on, byte by byte.
//
// Below a folder: links are followed; a folder or file met a second time (a link in a loop,
// overlapping paths) is taken once; names that start with a dot are left out; so are files without
// one of the wanted extensions, where there are any; so are devices, sockets and pipes. A file
// named by the caller itself is always taken.
//
// Cost: one record of about 100 bytes a file.

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::data {

struct TextFile {
  std::string path;  // to open it
  // From the folder that was named, or the file's own name: the same on every machine.
  std::string name;
};

struct TextFiles {
  std::vector<TextFile> files;
  int64_t num_hidden = 0;    // files and folders left out because their name starts with a dot
  int64_t num_repeated = 0;  // files met again
  int64_t num_other_extension = 0;  // files left out because of their extension
  int64_t num_special = 0;          // devices, sockets, pipes
};

// `extensions` with or without their dot; none means all files. Files in `excluded_paths` are left
// out (they need not exist), whatever name leads to them.
//
// Errors: ConfigError for a path that is missing or neither file nor folder, a folder that cannot
//         be read, a dangling link.
TextFiles find_text_files(const std::vector<std::string>& paths,
                          const std::vector<std::string>& extensions,
                          const std::vector<std::string>& excluded_paths);

}  // namespace tessera::data

#endif  // DATA_TEXT_FILES_H_
