#ifndef BASE_ERROR_H_
#define BASE_ERROR_H_

// Tessera reports errors as exceptions of four types. The type says who can mend it:
//
//   ConfigError      the caller: an option, a model or an input file that cannot work
//   CommError        the cluster: a peer is gone, late, or disagrees; start the run again
//   CheckpointError  a file: missing, torn, or of another model; pick another one
//   InternalError    us: an invariant of Tessera is broken
//
// A message says what was expected, what was found, where (rank, unit, parameter, file) and what to
// do. No rank may throw alone before a collective, or the others hang: see comm/agreement.h.

#include <sstream>
#include <stdexcept>
#include <string>

namespace tessera {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ConfigError : public Error {
 public:
  using Error::Error;
};

class CommError : public Error {
 public:
  using Error::Error;
};

class CheckpointError : public Error {
 public:
  using Error::Error;
};

class InternalError : public Error {
 public:
  using Error::Error;
};

namespace base {

// Concatenates its arguments with operator<<.
template <typename... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace base
}  // namespace tessera

// Throws ConfigError with the message (the arguments after the condition, concatenated) unless the
// condition holds.
#define TESSERA_CHECK_CONFIG(condition, ...)                           \
  do {                                                                 \
    if (!(condition)) {                                                \
      throw ::tessera::ConfigError(::tessera::base::str(__VA_ARGS__)); \
    }                                                                  \
  } while (false)

// Throws InternalError unless the condition holds. Always on: an invariant is cheap, a wrong model
// is not.
#define TESSERA_CHECK(condition, ...)                                                   \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      throw ::tessera::InternalError(::tessera::base::str(                              \
          "internal error at ", __FILE__, ":", __LINE__, ": expected " #condition ". ", \
          __VA_ARGS__, " This is a bug in Tessera; please report it."));                \
    }                                                                                   \
  } while (false)

#endif  // BASE_ERROR_H_
