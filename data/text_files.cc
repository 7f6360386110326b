#include "data/text_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

// What a file is, whatever name leads to it.
using FileId = std::pair<dev_t, ino_t>;

FileId id_of(const struct stat& info) { return {info.st_dev, info.st_ino}; }

struct stat stat_of(const std::string& path) {
  struct stat info {};
  TESSERA_CHECK_CONFIG(::stat(path.c_str(), &info) == 0, "cannot read ", path, ": ",
                       std::strerror(errno), ". Correct the path, or remove the dangling link.");
  return info;
}

class Finder {
 public:
  Finder(const std::vector<std::string>& extensions,
         const std::vector<std::string>& excluded_paths) {
    for (const std::string& extension : extensions) {
      TESSERA_CHECK_CONFIG(!extension.empty() && extension != ".",
                           "an extension is empty; expected for example \"txt\"");
      extensions_.insert(extension[0] == '.' ? extension : "." + extension);
    }
    for (const std::string& path : excluded_paths) {
      struct stat info {};
      if (::stat(path.c_str(), &info) == 0) excluded_.insert(id_of(info));
    }
  }

  void add(const std::string& path) {
    const struct stat info = stat_of(path);
    if (S_ISDIR(info.st_mode)) {
      const size_t first = result_.files.size();
      add_folder(path, "", info);
      std::sort(result_.files.begin() + static_cast<int64_t>(first), result_.files.end(),
                [](const TextFile& a, const TextFile& b) { return a.name < b.name; });
      return;
    }
    TESSERA_CHECK_CONFIG(S_ISREG(info.st_mode), path, " is neither a file nor a folder");
    add_file(path, fs::path(path).filename().string(), info);
  }

  TextFiles take() { return std::move(result_); }

 private:
  // `prefix`: the folder's path from the named folder on, with a slash, or "".
  void add_folder(const std::string& folder, const std::string& prefix, const struct stat& info) {
    if (!folders_.insert(id_of(info)).second) return;
    for (const std::string& name : sorted_names(folder)) {
      if (name[0] == '.') {
        ++result_.num_hidden;
        continue;
      }
      const std::string path = (fs::path(folder) / name).string();
      const struct stat entry = stat_of(path);
      if (S_ISDIR(entry.st_mode)) {
        add_folder(path, prefix + name + "/", entry);
      } else if (!S_ISREG(entry.st_mode)) {
        ++result_.num_special;
      } else if (!extensions_.empty() &&
                 extensions_.count(fs::path(name).extension().string()) == 0) {
        ++result_.num_other_extension;
      } else {
        add_file(path, prefix + name, entry);
      }
    }
  }

  void add_file(const std::string& path, const std::string& name, const struct stat& info) {
    if (excluded_.count(id_of(info)) != 0) return;
    if (!seen_.insert(id_of(info)).second) {
      ++result_.num_repeated;
      return;
    }
    result_.files.push_back({path, name});
  }

  // Sorted, because which of two names of one file is met first must not depend on the file system.
  static std::vector<std::string> sorted_names(const std::string& folder) {
    std::vector<std::string> names;
    std::error_code error;
    fs::directory_iterator entry(folder, error);
    for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
      names.push_back(entry->path().filename().string());
    }
    TESSERA_CHECK_CONFIG(!error, "cannot read the folder ", folder, ": ", error.message(), ".");
    std::sort(names.begin(), names.end());
    return names;
  }

  std::set<std::string> extensions_;
  std::set<FileId> excluded_;
  std::set<FileId> folders_;
  std::set<FileId> seen_;
  TextFiles result_;
};

}  // namespace

TextFiles find_text_files(const std::vector<std::string>& paths,
                          const std::vector<std::string>& extensions,
                          const std::vector<std::string>& excluded_paths) {
  Finder finder(extensions, excluded_paths);
  for (const std::string& path : paths) finder.add(path);
  return finder.take();
}

}  // namespace tessera::data
