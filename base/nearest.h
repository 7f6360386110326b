#ifndef BASE_NEAREST_H_
#define BASE_NEAREST_H_

// The known name nearest to a mistyped one, for error messages.

#include <string>
#include <vector>

namespace tessera::base {

// The candidate with the smallest edit distance to `name` (insert, delete, replace; the first of
// equals), or "" where even that one differs in more than half of its letters.
std::string nearest(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace tessera::base

#endif  // BASE_NEAREST_H_
