#include "base/resident_memory.h"

#include <fstream>
#include <sstream>
#include <string>

#include "base/error.h"

namespace tessera::base {
namespace {

// The value of a line "Name:   1234 kB".
int64_t read_bytes(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name + ":", 0) != 0) continue;
    std::istringstream fields(line.substr(name.size() + 1));
    int64_t kilobytes = -1;
    std::string unit;
    fields >> kilobytes >> unit;
    if (kilobytes >= 0 && unit == "kB") return kilobytes * 1024;
  }
  throw InternalError(str("expected a line '", name, ": N kB' in ", path, ", found none"));
}

}  // namespace

ResidentMemory resident_memory() {
  const std::string path = "/proc/self/status";
  return {read_bytes(path, "VmRSS"), read_bytes(path, "VmHWM")};
}

int64_t machine_memory_bytes() { return read_bytes("/proc/meminfo", "MemTotal"); }

}  // namespace tessera::base
