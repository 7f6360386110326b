#ifndef APPS_CONFIG_KEYS_H_
#define APPS_CONFIG_KEYS_H_

// The table of all configuration keys. A new key is a member of its section in apps/config.h and a
// row here.

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "apps/config.h"

namespace tessera::apps {

// Where a key's value is; the alternative is its type. An optional is a key that may stay unset.
using Slot =
    std::variant<int64_t*, double*, std::string*, std::optional<bool>*, std::optional<double>*>;

// What a number may be; everything without bounds.
struct Range {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool above_low = false;   // low itself is not allowed
  bool below_high = false;  // high itself is not allowed

  bool contains(double value) const {  // false for NaN and infinities
    return value - value == 0 && (above_low ? value > low : value >= low) &&
           (below_high ? value < high : value <= high);
  }
};

struct Key {
  const char* section;
  const char* name;
  Slot (*slot)(JobConfig&);
  const char* help;
  Range range;                       // for numbers
  std::vector<std::string> choices;  // for text; none: any

  std::string full_name() const { return std::string(section) + "." + name; }
};

struct Section {
  const char* name;
  const char* help;
};

// In the order in which they are printed; the keys of a section follow each other.
const std::vector<Section>& config_sections();
const std::vector<Key>& config_keys();

// What a value of this key must be: "an integer >= 1", "one of \"AdamW\", \"SGD\"".
std::string describe_allowed(const Key& key);

// The value as TOML, or "" when the key is unset.
std::string value_text(const Key& key, const JobConfig& config);

}  // namespace tessera::apps

#endif  // APPS_CONFIG_KEYS_H_
