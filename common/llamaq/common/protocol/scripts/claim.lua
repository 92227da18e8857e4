-- Claims jobs of one partition for a worker: begins a new attempt of each, which prepares the job and waits for a slot.
-- `flush.lua` starts the job when it has a slot.
--
-- Keys of job i, where i counts from 0:
-- KEYS[3i+1]  job     hash of the job
-- KEYS[3i+2]  events  stream of the job's events
-- KEYS[3i+3]  stream  job stream that the job's entry was read from
--
-- ARGV[1]  group     consumer group of the job streams
-- ARGV[2]  worker    id of the worker
-- ARGV[3]  lease_ms  how long the worker keeps a job without a renewal, in ms
-- ARGV[4]  at_risk   '1': the worker prepares the jobs now, so its death counts as a crash; '0': it does not yet
-- ARGV[5]  model     fingerprint of the worker's model; '': not known
-- ARGV[6]  restart   '1': the worker starts a job of another model again, if possible; '0': it leaves the job
-- ARGV[7]  values    msgpack of an array with three values for each job
--     1  entry    id of the job's entry
--     2  channel  channel of the job's events
--     3  from     number of the attempt that waits for a slot in another worker, from which the job is taken; '': any
--
-- Tokens of two models are never mixed in one job. If another model has stored tokens of the job, its entry is left to
-- the workers of that model: it can be taken again after LEFT_MS. With `restart`, a job with stream=false, of which no
-- token was published, begins again with its first token, and other jobs fail.
--
-- With `from`, a death of the other worker is counted as in check_crash.lua, because this worker may have died. If it
-- is alive, its next call for its attempt returns 'lost' and removes the death.
--
-- Returns an array with one reply for each job. If the requests of the first jobs are large, it has replies to these jobs
-- only, and the others are unchanged: the caller calls again for them.
--         {'run', attempt, request, generated, waited_ms, queue_ms, slot_ms, left_ms, retries_left, token_times}
--                    the attempt has begun; `generated` tokens are stored. `waited_ms` is the time since the
--                    submit, or since a later time for which the job was submitted, `queue_ms` the time from then to
--                    the first slot, -1 if the job had no slot so far, `slot_ms` the
--                    time that it has had a slot, `left_ms` the time until its deadline, -1 if it has none,
--                    `retries_left` the number of its retries, -1 if it was submitted without retries.
--                    `token_times` tells when the stored tokens were generated
--         {'gone'}   the job does not exist; the caller makes a dead letter of the entry
--         {'done'}   the job has ended, or this is not its entry; the entry was dropped
--         {'ended'}  the job was cancelled, or has reached a deadline or its timeout; it has ended here
--         {'stale'}  the job is no longer waiting in the attempt `from`
--         {'paused'} the queue is paused, and the job had no slot so far; the entry is requeued
--         {'left'}   the job is left to a worker with the model that has begun it
--         {'error', text}  the keys of the job have unexpected content: another client has overwritten them

local group, worker, lease_ms, at_risk, model, restarts = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5], ARGV[6] == '1'
local LEFT_MS = 2000
local MAX_REPLY_BYTES = 1048576 -- size of requests from which on no further job is claimed
local values, now, is_queue_paused = cmsgpack.unpack(ARGV[7]), now_ms(), is_paused(KEYS[3])
local replies, n_bytes, n_attempts = {}, 0, 0

-- Returns whether another model has stored tokens of the job.
local function is_of_other_model(of_job, generated)
  return model ~= '' and of_job and of_job ~= model and generated ~= '0'
end

local function claim(job, events, stream, entry, channel, from)
  local state = redis.call('HMGET', job,
    'status', 'entry', 'cancel', 'queue_deadline_ms', 'submitted_ms', 'started_ms', 'priority',
    'generated', 'generated_at_start', 'attempt', 'worker', 'at_risk', 'deadline_ms',
    'timeout_ms', 'slot_ms', 'model', 'waits_from_ms', 'retries_left', 'token_times', 'move_factor')
  if not state[1] then
    return {'gone'}
  end
  if has_ended(state[1]) or not is_entry_of_job(state[2], state[7], stream, entry) then
    drop_entry(stream, group, entry)
    return {'done'}
  end
  if from ~= '' and (state[1] ~= 'queued' or tonumber(state[10]) ~= from) then
    return {'stale'}
  end
  if state[3] then
    end_without_worker(job, events, channel, stream, group, entry, 'cancelled')
    return {'ended'}
  end

  local due = due_ms('queued', state[6], state[4], state[13])
  local timeout, slot_time = tonumber(state[14] or '0'), tonumber(state[15] or '0')
  if (due and now >= due) or (timeout > 0 and slot_time >= timeout) then
    end_without_worker(job, events, channel, stream, group, entry, 'deadline')
    return {'ended'}
  end

  if not state[6] and is_queue_paused then
    if from ~= '' then
      return {'stale'}
    end
    requeue_entry(stream, group, entry)
    return {'paused'}
  end

  if is_of_other_model(state[16], state[8]) then
    if not restarts then
      if from ~= '' then
        return {'stale'}
      end
      renew_lease(stream, group, WAITING, entry, LEFT_MS)
      return {'left'}
    end
    if cmsgpack.unpack(redis.call('HGET', job, 'request')).stream ~= false then
      local failed = cmsgpack.pack({type = 'failed', code = 'other_model',
        message = 'another model generated the first ' .. state[8] .. ' tokens, and its workers are gone'})
      terminate(job, events, channel, stream, group, entry, 'failed', failed, {'error', failed})
      return {'ended'}
    end
    allow_writes_when_full(job)
    redis.call('DEL', events)
    redis.call('HSET', job, 'generated', 0)
    state[8] = '0'
  end

  local submitted, started = tonumber(state[17] or state[5]), tonumber(state[6] or '-1')
  local waited = now - submitted
  allow_writes_when_full(job) -- claimed jobs end, and that frees memory
  local attempt = redis.call('HINCRBY', job, 'attempt', 1)
  n_attempts = n_attempts + 1
  if state[9] and state[8] ~= state[9] then
    redis.call('HDEL', job, 'crashes', 'deaths') -- the last attempt stored tokens, so earlier crashes no longer count
  elseif from ~= '' and state[12] then
    add_death(job, from, state[11])
  end
  -- The stream of an interrupted job has stopped, so the job waits only a short time for a slot of this worker. After
  -- each move, a job stays longer in its worker, so that it does not move to and fro.
  local move_factor = state[6] and 0.25 or 1
  if from ~= '' then
    move_factor = tonumber(state[20] or '1') * (state[11] == worker and 1 or 2)
  end
  local fields = {'status', 'queued', 'worker', worker, 'lease_ms', lease_ms, 'claimed_ms', now,
    'generated_at_start', state[8], 'move_factor', move_factor}
  if model ~= '' and state[8] == '0' then
    fields[#fields + 1], fields[#fields + 2] = 'model', model
  end
  if at_risk then
    fields[#fields + 1], fields[#fields + 2] = 'at_risk', 1
  elseif state[12] then
    redis.call('HDEL', job, 'at_risk')
  end
  redis.call('HSET', job, unpack(fields))
  renew_lease(stream, group, WAITING, entry, lease_ms)
  return {
    'run', attempt, redis.call('HGET', job, 'request') or '', tonumber(state[8]), waited,
    started < 0 and -1 or started - submitted, slot_time, (tonumber(state[13] or '0') > 0) and state[13] - now or -1,
    tonumber(state[18] or '-1'), state[8] ~= '0' and state[19] or '',
  }
end

for i = 0, #KEYS / 3 - 1 do
  local v = 3 * i
  local reply = for_one_job(
    claim, KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3], values[v + 1], values[v + 2], values[v + 3])
  replies[i + 1] = reply
  n_bytes = n_bytes + (reply[1] == 'run' and #reply[3] or 0)
  if n_bytes >= MAX_REPLY_BYTES then
    break
  end
end
if n_attempts > 0 then
  count_events(KEYS[1], 'attempts', n_attempts)
end
return reply_for_jobs(replies)
