#include "apps/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <type_traits>
#include <utility>
#include <variant>

#include "apps/config_keys.h"
#include "apps/llama_config.h"
#include "base/error.h"
#include "base/nearest.h"

namespace tessera::apps {
namespace {

using Value = std::variant<bool, int64_t, double, std::string>;

const Section* find_section(const std::string& name) {
  for (const Section& section : config_sections()) {
    if (section.name == name) return &section;
  }
  return nullptr;
}

const Key* find_key(const std::string& section, const std::string& name) {
  for (const Key& key : config_keys()) {
    if (key.section == section && key.name == name) return &key;
  }
  return nullptr;
}

// The full name of the key that was probably meant, or "".
std::string guess_key(const std::string& section, const std::string& name) {
  std::vector<std::string> names, siblings, full_names;
  for (const Key& key : config_keys()) {
    if (key.name == name) return key.full_name();  // in another section
    if (key.section == section) siblings.push_back(key.name);
    names.push_back(key.name);
    full_names.push_back(key.full_name());
  }
  const std::string sibling = base::nearest(name, siblings);
  if (!sibling.empty()) return section + "." + sibling;
  const std::string other = base::nearest(name, names);
  if (!other.empty()) return guess_key("", other);
  return base::nearest(section + "." + name, full_names);
}

[[noreturn]] void throw_unknown_section(const std::string& name, const std::string& where) {
  std::vector<std::string> names;
  std::string all;
  for (const Section& section : config_sections()) {
    names.push_back(section.name);
    all += (all.empty() ? "" : ", ") + names.back();
  }
  const std::string guess = base::nearest(name, names);
  throw ConfigError(base::str(where, ": unknown section '", name, "'.",
                              guess.empty() ? "" : " Did you mean '" + guess + "'?",
                              " Sections: ", all, "."));
}

const Key& require_key(const std::string& section, const std::string& name,
                       const std::string& where) {
  if (find_section(section) == nullptr) throw_unknown_section(section, where);
  const Key* key = find_key(section, name);
  if (key != nullptr) return *key;
  const std::string guess = guess_key(section, name);
  std::string all;
  for (const Key& sibling : config_keys()) {
    if (sibling.section == section) all += (all.empty() ? "" : ", ") + std::string(sibling.name);
  }
  throw ConfigError(base::str(where, ": unknown key '", section, ".", name, "'.",
                              guess.empty() ? "" : " Did you mean '" + guess + "'?", " Keys of [",
                              section, "]: ", all, "."));
}

// Stores the value; false when type, range or choices do not allow it.
bool set_value(JobConfig& config, const Key& key, const Value& value) {
  const auto number = [&](double& slot) {
    double given = 0;
    if (const auto* integer = std::get_if<int64_t>(&value)) {
      given = static_cast<double>(*integer);
    } else if (const auto* real = std::get_if<double>(&value)) {
      given = *real;
    } else {
      return false;
    }
    slot = given;
    return key.range.contains(given);
  };
  return std::visit(
      [&](auto* slot) {
        using Type = std::decay_t<decltype(*slot)>;
        if constexpr (std::is_same_v<Type, double>) {
          return number(*slot);
        } else if constexpr (std::is_same_v<Type, std::optional<double>>) {
          return number(slot->emplace());
        } else if constexpr (std::is_same_v<Type, std::optional<bool>>) {
          const bool* given = std::get_if<bool>(&value);
          if (given != nullptr) *slot = *given;
          return given != nullptr;
        } else {  // int64_t and text
          const Type* given = std::get_if<Type>(&value);
          if (given == nullptr) return false;
          *slot = *given;
          if constexpr (std::is_same_v<Type, int64_t>) {
            return key.range.contains(static_cast<double>(*given));
          } else {
            return key.choices.empty() ||
                   std::find(key.choices.begin(), key.choices.end(), *given) != key.choices.end();
          }
        }
      },
      key.slot(config));
}

void set_or_throw(JobConfig& config, const Key& key, const std::optional<Value>& value,
                  const std::string& found, const std::string& where) {
  if (value && set_value(config, key, *value)) return;
  std::string guess;
  if (value && std::holds_alternative<std::string>(*value)) {
    guess = base::nearest(std::get<std::string>(*value), key.choices);
  }
  throw ConfigError(base::str(where, ": ", key.full_name(), ": expected ", describe_allowed(key),
                              ", found ", found, ".",
                              guess.empty() ? "" : " Did you mean \"" + guess + "\"?"));
}

std::optional<Value> toml_value(const toml::node& node) {
  if (const auto* value = node.as_boolean()) return Value(value->get());
  if (const auto* value = node.as_integer()) return Value(value->get());
  if (const auto* value = node.as_floating_point()) return Value(value->get());
  if (const auto* value = node.as_string()) return Value(value->get());
  return std::nullopt;
}

std::string describe_node(const toml::node& node) {
  if (const auto* value = node.as_boolean()) return value->get() ? "true" : "false";
  if (const auto* value = node.as_integer()) return base::str("the integer ", value->get());
  if (const auto* value = node.as_floating_point()) return base::str("the number ", value->get());
  if (const auto* value = node.as_string()) return base::str("the text \"", value->get(), "\"");
  if (node.is_table()) return "a table";
  if (node.is_array()) return "an array";
  return "a date or time";
}

// The value of an argument, read as the key's type demands; nothing when it cannot be.
std::optional<Value> argument_value(const Key& key, const std::string& text) {
  const char* end = text.data() + text.size();
  const auto parse = [&](auto number) -> std::optional<Value> {
    const auto result = std::from_chars(text.data(), end, number);
    if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
    return Value(number);
  };
  JobConfig any;
  const Slot slot = key.slot(any);
  if (std::holds_alternative<std::string*>(slot)) return Value(text);
  if (std::holds_alternative<int64_t*>(slot)) return parse(int64_t{0});
  if (!std::holds_alternative<std::optional<bool>*>(slot)) return parse(0.0);
  if (text == "true") return Value(true);
  if (text == "false") return Value(false);
  return std::nullopt;
}

void validate_schedule(const JobConfig& config) {
  const int64_t steps = config.training.steps;
  const LrSchedulerSection& schedule = config.lr_scheduler;
  TESSERA_CHECK_CONFIG(schedule.warmup_steps <= steps,
                       "lr_scheduler.warmup_steps = ", schedule.warmup_steps,
                       " is more than training.steps = ", steps);
  if (!schedule.decay_ratio) return;
  const int64_t decay = std::llround(*schedule.decay_ratio * static_cast<double>(steps));
  TESSERA_CHECK_CONFIG(schedule.warmup_steps + decay <= steps,
                       "lr_scheduler.warmup_steps = ", schedule.warmup_steps, " and ", decay,
                       " decay steps (lr_scheduler.decay_ratio = ", *schedule.decay_ratio,
                       ") are more than training.steps = ", steps,
                       "; make one smaller, or leave decay_ratio out to decay after the warm-up");
}

}  // namespace

JobConfig load_config(const std::string& toml_path, const std::vector<std::string>& overrides) {
  JobConfig config;
  if (!toml_path.empty()) {
    std::error_code error;
    TESSERA_CHECK_CONFIG(!std::filesystem::is_directory(toml_path, error), "'", toml_path,
                         "' is a folder; expected a TOML file");
    std::ifstream file(toml_path, std::ios::binary);
    TESSERA_CHECK_CONFIG(file.is_open(), "cannot open the configuration file '", toml_path,
                         "': ", std::strerror(errno));
    std::ostringstream text;
    text << file.rdbuf();
    apply_toml(config, text.str(), toml_path);
  }
  apply_overrides(config, overrides);
  return config;
}

void apply_toml(JobConfig& config, const std::string& text, const std::string& source) {
  toml::table table;
  try {
    table = toml::parse(text, source);
  } catch (const toml::parse_error& error) {
    const toml::source_position at = error.source().begin;
    throw ConfigError(
        base::str(source, ":", at.line, ":", at.column, ": not valid TOML: ", error.description()));
  }
  for (const auto& [section, node] : table) {
    const std::string section_name(section.str());
    const std::string where = base::str(source, ":", section.source().begin.line);
    const toml::table* keys = node.as_table();
    if (keys == nullptr && find_section(section_name) == nullptr) {
      const std::string guess = guess_key("", section_name);
      throw ConfigError(base::str(where, ": '", section_name, "' is outside of any [section].",
                                  guess.empty() ? "" : " Did you mean '" + guess + "'?"));
    }
    if (find_section(section_name) == nullptr) throw_unknown_section(section_name, where);
    TESSERA_CHECK_CONFIG(keys != nullptr, where, ": expected a section [", section_name,
                         "], found ", describe_node(node));
    for (const auto& [name, value] : *keys) {
      const std::string here = base::str(source, ":", name.source().begin.line);
      const Key& key = require_key(section_name, std::string(name.str()), here);
      set_or_throw(config, key, toml_value(value), describe_node(value), here);
    }
  }
}

void apply_overrides(JobConfig& config, const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const size_t equals = argument.find('=');
    const std::string option = argument.substr(0, equals);
    const std::string name = option.substr(0, 2) == "--" ? option.substr(2) : "";
    const size_t dot = name.find('.');
    if (name.empty() || dot == std::string::npos) {
      const std::string guess = guess_key("", name);
      throw ConfigError(base::str("argument '", argument, "': expected --section.key=value.",
                                  guess.empty() ? "" : " Did you mean --" + guess + "?"));
    }
    const Key& key = require_key(name.substr(0, dot), name.substr(dot + 1), option);
    std::string text;
    if (equals != std::string::npos) {
      text = argument.substr(equals + 1);
    } else {
      TESSERA_CHECK_CONFIG(i + 1 < arguments.size(), option, ": the value is missing; expected ",
                           describe_allowed(key));
      text = arguments[++i];
    }
    set_or_throw(config, key, argument_value(key, text), "'" + text + "'", "command line");
  }
}

void validate(const JobConfig& config) {
  make_llama_config(config, /*data_vocab_size=*/0);
  validate_schedule(config);
  const TrainingSection& training = config.training;
  TESSERA_CHECK_CONFIG(training.global_batch_size == -1 ||
                           (training.global_batch_size > 0 &&
                            training.global_batch_size % training.local_batch_size == 0),
                       "training.global_batch_size = ", training.global_batch_size,
                       " is not a multiple of training.local_batch_size = ",
                       training.local_batch_size, ", nor -1 (local_batch_size x number of ranks)");
  const ParallelismSection& parallelism = config.parallelism;
  TESSERA_CHECK_CONFIG(
      parallelism.strategy == "fsdp" || parallelism.fsdp_reshard_after_forward == "default",
      "parallelism.fsdp_reshard_after_forward = \"", parallelism.fsdp_reshard_after_forward,
      "\" has no effect with parallelism.strategy = \"", parallelism.strategy, "\"; leave it out");
  TESSERA_CHECK_CONFIG(config.optimizer.name == "SGD" || config.optimizer.momentum == 0,
                       "optimizer.momentum = ", config.optimizer.momentum,
                       " has no effect with optimizer.name = \"", config.optimizer.name,
                       "\" (use beta1, or SGD)");
  TESSERA_CHECK_CONFIG(
      config.sampling.sample_bytes == 0 || !config.sampling.sample_prompt.empty(),
      "sampling.sample_prompt is empty; a sample needs at least one byte to continue");
}

LlamaConfig make_llama_config(const JobConfig& config, int64_t data_vocab_size) {
  const ModelSection& model = config.model;
  LlamaConfig result;
  if (model.flavor == "custom") {
    const std::pair<const char*, int64_t> needed[] = {{"dim", model.dim},
                                                      {"n_layers", model.n_layers},
                                                      {"n_heads", model.n_heads},
                                                      {"ffn_dim", model.ffn_dim},
                                                      {"vocab_size", model.vocab_size}};
    for (const auto& [name, value] : needed) {
      TESSERA_CHECK_CONFIG(value > 0, "model.", name, " is not set, and model.flavor = \"custom\" ",
                           "has no value for it; give model.", name, " or choose a flavor");
    }
    result.n_kv_heads = model.n_heads;
  } else {
    result = llama_flavor(model.flavor);
  }
  const auto set = [](auto& value, auto given) {
    if (given > 0) value = given;
  };
  set(result.dim, model.dim);
  set(result.n_layers, model.n_layers);
  set(result.n_heads, model.n_heads);
  set(result.n_kv_heads, model.n_kv_heads);
  set(result.ffn_dim, model.ffn_dim);
  set(result.rope_theta, model.rope_theta);
  set(result.norm_eps, model.norm_eps);
  if (model.tied_embeddings) result.tied_embeddings = *model.tied_embeddings;
  result.init = model.init;
  result.max_seq_len = config.training.seq_len;
  if (model.vocab_size > 0) {
    TESSERA_CHECK_CONFIG(model.vocab_size >= data_vocab_size,
                         "model.vocab_size = ", model.vocab_size,
                         " is smaller than the data's vocabulary of ", data_vocab_size,
                         " tokens; leave it out or make it larger");
    result.vocab_size = model.vocab_size;
  } else {
    result.vocab_size = std::max(result.vocab_size, data_vocab_size);
  }
  check(result);
  return result;
}

std::string print_config(const JobConfig& config) {
  std::ostringstream out;
  for (const Section& section : config_sections()) {
    out << (out.tellp() > 0 ? "\n" : "") << "[" << section.name << "]\n";
    for (const Key& key : config_keys()) {
      if (std::string(key.section) != section.name) continue;
      const std::string value = value_text(key, config);
      if (value.empty()) {
        out << "# " << key.name << " is not set: " << key.help << "\n";
      } else {
        out << key.name << " = " << value << "\n";
      }
    }
  }
  return out.str();
}

std::string config_help() {
  const JobConfig defaults;
  std::ostringstream out;
  for (const Section& section : config_sections()) {
    out << "\n[" << section.name << "]  " << section.help << "\n";
    for (const Key& key : config_keys()) {
      if (std::string(key.section) != section.name) continue;
      const std::string value = value_text(key, defaults);
      out << "  --" << key.full_name() << "  (" << describe_allowed(key) << "; "
          << (value.empty() ? "unset" : "default " + value) << ")\n"
          << "      " << key.help << "\n";
    }
  }
  return out.str();
}

}  // namespace tessera::apps
