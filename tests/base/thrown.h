#ifndef TESTS_BASE_THROWN_H_
#define TESTS_BASE_THROWN_H_

// The message of an expected exception, for tests that check type and text.

#include <exception>
#include <string>
#include <typeinfo>

namespace tessera {

// What `call` throws, when it is an `Error`; else a text that says what happened in its place, in
// angle brackets so that no check of a whole message is met by it.
template <typename Error, typename Call>
std::string thrown(const Call& call) {
  try {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
  } catch (const std::exception& error) {
    return std::string("<another type: ") + typeid(error).name() + ": " + error.what() + ">";
  }
  return "<no exception>";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tessera

#endif  // TESTS_BASE_THROWN_H_
