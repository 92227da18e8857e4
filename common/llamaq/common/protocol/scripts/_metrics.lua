-- Counts the jobs of a queue for its metrics. This file is put in front of `_lib.lua`.
--
-- Each partition has a hash `metrics` with counters, which `llamaq metrics` adds up. Its fields, where PRIORITY is
-- 'interactive' or 'bulk', and BOUND is the upper bound of a histogram's bucket: a number, or 'inf'.
--   attempts, retries, crashes              of all jobs
--   PRIORITY:submitted
--   PRIORITY:finished:REASON                ends by finish reason
--   PRIORITY:failed:CODE                    ends by error code
--   PRIORITY:duration_ms:BOUND, :sum        time from submit to the end
--   PRIORITY:queue_ms:BOUND, :sum           time from submit to the first slot, or to the end
--   PRIORITY:first_token_ms:BOUND, :sum     time from submit to the first token
--   PRIORITY:prompt_ms                      time from the first slot to the first token
--   PRIORITY:inter_token_ms:BOUND, :sum     time between two tokens
--   PRIORITY:prompt_tokens:BOUND, :sum      length of the prompt
--   PRIORITY:output_tokens:BOUND, :sum      length of the output
--   PRIORITY:computed, PRIORITY:cached:TIER prompt tokens of the last run
--   PRIORITY:lookups:TIER                   last runs by the tier of their cached tokens; 'none': there were none
--   about                                   a text of more than 64 bytes: with it, Redis uses a hash table, in which it
--                                           finds a field faster than in the packed form
--
-- For a job that was submitted for a later time, times count from this later time.

local ABOUT = 'Counters of the jobs of this partition. The command `llamaq metrics` adds up all partitions.'

-- Bounds of the buckets of times in ms; JOB_TIMES_MS in metrics/buckets.py has the same.
local JOB_TIMES_MS = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000,
  1000000, 2000000, 5000000, 10000000}
local MAX_LENGTH_BOUND = 1048576

local function metrics_key(job)
  return string.match(job, '^(.-}:)') .. 'metrics'
end

-- Adds a number of events to a counter, and returns the counter. The function ignores errors of Redis, and returns a table
-- then: a counter must not stop a job.
local function count_events(job, name, number)
  return redis.pcall('HINCRBY', metrics_key(job), name, number)
end

-- Adds `counts` to the counters. It has a table of counters by name for each priority, in which a histogram is a table too.
-- The names of the fields are built here, once for all jobs of a call. Two commands for all counters cost less than one
-- for each counter. Another client may have overwritten the key: then the counters begin again. The function ignores
-- errors of Redis, because a counter must not stop a job.
local function store_counts(job, counts)
  local key, names, numbers, values = metrics_key(job), {'about'}, {}, {}
  local function add_field(name, number)
    names[#names + 1], numbers[name] = name, number
  end
  for priority, counters in pairs(counts) do
    for name, counter in pairs(counters) do
      if type(counter) == 'number' then
        add_field(priority .. ':' .. name, counter)
      else
        for bound, number in pairs(counter) do
          add_field(priority .. ':' .. name .. ':' .. bound, number)
        end
      end
    end
  end
  if #names == 1 then
    return
  end
  local stored = redis.pcall('HMGET', key, unpack(names))
  if stored.err then
    redis.pcall('DEL', key)
    stored = {}
  end
  for i = 2, #names do
    values[2 * i - 3], values[2 * i - 2] = names[i], (tonumber(stored[i] or '') or 0) + numbers[names[i]]
  end
  if not stored[1] then
    values[#values + 1], values[#values + 2] = 'about', ABOUT
  end
  redis.pcall('HSET', key, unpack(values))
end

-- Adds a number to one of the counters of a priority.
local function add_count(counters, name, number)
  counters[name] = (counters[name] or 0) + number
end

-- Returns a histogram of a priority: a table with the sum and the counts of the buckets.
local function histogram_of(counters, name)
  counters[name] = counters[name] or {sum = 0}
  return counters[name]
end

local function add_value(counters, name, bound, value)
  local histogram = histogram_of(counters, name)
  add_count(histogram, bound, 1)
  add_count(histogram, 'sum', value)
end

local function add_time(counters, name, ms)
  for _, bound in ipairs(JOB_TIMES_MS) do
    if ms <= bound then
      return add_value(counters, name, bound, ms)
    end
  end
  add_value(counters, name, 'inf', ms)
end

local function add_length(counters, name, n_tokens)
  local bound = 1
  while bound < n_tokens and bound < MAX_LENGTH_BOUND do
    bound = 2 * bound
  end
  add_value(counters, name, bound < n_tokens and 'inf' or bound, n_tokens)
end

-- Adds the times of a job's tokens, 'FIRST LAST BOUND=COUNT ...' (see `TokenTimes` in worker/broker/token_times.py). The
-- job has waited for `queue_ms`.
local function add_token_times(counters, token_times, queue_ms)
  local first, last, between = string.match(token_times, '^(%d+) (%d+)(.*)$')
  if not first then
    return
  end
  add_time(counters, 'first_token_ms', tonumber(first))
  add_count(counters, 'prompt_ms', math.max(0, first - queue_ms))
  local histogram = histogram_of(counters, 'inter_token_ms')
  for bound, count in string.gmatch(between, '(%w+)=(%d+)') do
    add_count(histogram, bound, tonumber(count))
  end
  add_count(histogram, 'sum', math.max(0, last - first))
end

-- Adds the prompt of a job that a worker has prepared: 'PROMPT COMPUTED CACHED TIER', in tokens.
local function add_prompt(counters, usage)
  local prompt, computed, cached, tier = string.match(usage, '^(%d+) (%d+) (%d+) (%a+)$')
  if not prompt then
    return
  end
  add_length(counters, 'prompt_tokens', tonumber(prompt))
  if tier == 'unused' then -- the job had no slot
    return
  end
  add_count(counters, 'computed', tonumber(computed))
  add_count(counters, 'lookups:' .. tier, 1)
  if tier ~= 'none' then
    add_count(counters, 'cached:' .. tier, tonumber(cached))
  end
end

-- Adds a job that ends to `counts`. `state` has the fields of its hash, those of its end included. `terminal` is the msgpack
-- of its terminal event.
local function add_end(counts, state, terminal)
  local priority = state.priority == 'bulk' and 'bulk' or 'interactive'
  counts[priority] = counts[priority] or {}
  local counters = counts[priority]
  local reason = state.status == 'finished' and state.finish_reason or cmsgpack.unpack(terminal).code
  add_count(counters, state.status .. ':' .. tostring(reason), 1)
  local finished = tonumber(state.finished_ms)
  local since = tonumber(state.waits_from_ms or state.submitted_ms or '') or finished
  add_time(counters, 'duration_ms', math.max(0, finished - since))
  local queue_ms = math.max(0, (tonumber(state.started_ms or '') or finished) - since)
  add_time(counters, 'queue_ms', queue_ms)
  add_length(counters, 'output_tokens', tonumber(state.generated or '') or 0)
  add_token_times(counters, state.token_times or '', queue_ms)
  add_prompt(counters, state.usage or '')
end
