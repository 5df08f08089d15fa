// What the environment says about the pretend devices, and what is counted of their work.
#pragma once
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace pretend {
using namespace c10;
constexpr auto kPretend = DeviceType::PrivateUse1;

inline std::string setting(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? text : otherwise;
}
inline int64_t number_setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoll(text, nullptr, 10) : otherwise;
}
inline bool is_set(const char* name) { return number_setting(name, 0) != 0; }

inline const std::string& device_name() {
  static const std::string name = setting("PRETEND_NAME", "npu");
  return name;
}
inline std::string upper_name() {
  std::string name = device_name();
  for (char& c : name) c = (char)std::toupper(c);
  return name;
}
inline bool refuses_float64() {
  static const bool refuses = is_set("PRETEND_NO_FLOAT64");
  return refuses;
}
inline bool poisons_memory() {
  static const bool poisons = is_set("PRETEND_POISON");
  return poisons;
}

// One lock guards all accounts below (clocks, blocks, pending copies, counters); kernels run outside it.
inline std::recursive_mutex& accounts() {
  static auto* mutex = new std::recursive_mutex();
  return *mutex;
}
using Lock = std::unique_lock<std::recursive_mutex>;

// Set by the first use of a device in this process; a fork after it spoils the child.
inline bool is_used = false, is_bad_fork = false;

// The devices that this process may see, by their numbers in the machine. As with Ascend's variable,
// reading stops at whatever is no digit or comma; as with CUDA's, at a device that is not there.
inline std::vector<int> read_visible() {
  const int count = (int)number_setting("PRETEND_DEVICES", 2);
  const char* text = std::getenv(device_name() == "npu" ? "ASCEND_RT_VISIBLE_DEVICES" : "PRETEND_VISIBLE_DEVICES");
  std::vector<int> all;
  if (!text) {
    for (int i = 0; i < count; ++i) all.push_back(i);
    return all;
  }
  while (*text >= '0' && *text <= '9') {
    int index = (int)std::strtol(text, const_cast<char**>(&text), 10);
    if (index >= count) break;
    all.push_back(index);
    if (*text == ',') ++text;
  }
  return all;
}
// Read again until a device is used: a worker may be told its devices after it was forked.
inline const std::vector<int>& visible() {
  static auto* frozen = new std::vector<int>();
  static bool is_frozen = false;
  if (is_frozen) return *frozen;
  *frozen = read_visible();
  is_frozen = is_used;
  return *frozen;
}
inline int device_count() {
  Lock lock(accounts());
  return (int)visible().size();
}

// Why the host waited for a device.
enum class Wait { ITEM, COPY_TO_HOST, COPY_FROM_HOST, EVENT, STREAM, DEVICE, KERNEL, BARRIER, COUNT };
constexpr std::array<const char*, (size_t)Wait::COUNT> kWaitNames{
    "item", "copy_to_host", "copy_from_host", "event", "stream", "device", "kernel", "barrier"};

struct Counters {
  int64_t kernels = 0, copies_to_host = 0, copies_from_host = 0, copies_late = 0, collectives = 0, races = 0;
  std::array<int64_t, (size_t)Wait::COUNT> waits{};
};
inline Counters counters;
inline std::map<std::string, int64_t> kernel_counts;

enum class SyncMode { DEFAULT, ERROR };
inline SyncMode sync_mode = SyncMode::DEFAULT;

inline void count_wait(Wait why) {
  TORCH_CHECK(sync_mode != SyncMode::ERROR, "pretend: the host waits for the device (", kWaitNames[(size_t)why],
              "), which the sync mode \"error\" forbids");
  counters.waits[(size_t)why]++;
}
}  // namespace pretend
